"""The command ``refold bench``."""

from __future__ import annotations

import json
import math
import os
import shlex
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ArgumentError, CapacityError, RefoldError
from . import plots, progress, rows
from .suites import GPU, SUITES, choose, free_memory

app = typer.Typer(help="Run benchmarks, and compare and draw their results.", no_args_is_help=True)


@app.command("list")
def list_suites() -> None:
    """List the suites, what each shows, and its options."""
    for suite in SUITES.values():
        try:
            about = suite.about()
            options = " ".join(f"{name}={_text(default)}" for name, default in suite.options().items())
        except RefoldError as error:
            about, options = str(error), ""
        typer.echo(f"{suite.name:24} {about}")
        if options:
            typer.echo(f"{'':24}   {options}")
    typer.echo(f"{'gpu':24} All of these that need a GPU, {len(GPU)} in all, with the options whose rows are stored.")


@app.command()
def run(
    suites: Annotated[list[str], typer.Argument(help="Names that `refold bench list` shows; gpu: all for one.")],
    out: Annotated[Path | None, typer.Option(help="Append each row to this file as it is measured.")] = None,
    given: Annotated[
        list[str] | None,
        typer.Option("--set", help="An option: name=value or suite.name=value.", show_default=False),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Skip measurements that the file of --out has.")] = False,
    limit: Annotated[
        float, typer.Option(help="Begin no measurement after so many seconds.", show_default="none")
    ] = math.inf,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
    cpu: Annotated[bool, typer.Option("--cpu", help="Use no GPU: --set device=cpu.")] = False,
) -> None:
    """Run suites, and print one line per measurement.

    Exit code 3 if --limit left measurements; else 1 if one was refused because its result is wrong, or if one of
    several suites failed (the others still run). Rows measured before Ctrl-C stay in the file of --out.
    """
    if resume and out is None:
        raise ArgumentError("--resume needs --out FILE, which has the rows that were measured before")
    if not limit >= 0:
        raise ArgumentError(f"--limit is {limit}. Give seconds, 0 or more")
    ends = time.monotonic() + limit
    chosen = [
        (suite, suite.settings(texts),
         shlex.join(["refold", "bench", "run", suite.name, *(f"--set={name}={text}" for name, text in texts.items())]))
        for suite, texts in choose(suites, dict(map(_pair, [*(given or []), *(["device=cpu"] if cpu else [])])))
    ]  # fmt: skip
    for suite, options, _ in chosen:
        suite.check_device(options)
    if out is not None:
        rows.check_writable(out)
    if len(chosen) > 1:  # else JAX takes three quarters of a GPU's memory, and the other suites have the rest
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    env, refused, failed = rows.environment(), 0, list[str]()
    done = rows.read(out) if resume and out is not None and out.exists() else []
    total = progress.count([(suite.name, partial(suite.load(), **options)) for suite, options, _ in chosen], done)
    if done and not total:
        typer.echo(f"nothing to measure: {out} has all of it", err=True)
    try:
        with progress.shown(total, quiet) as told, progress.active(progress.BenchRun(done, told, ends=ends)) as running:
            for suite, options, command in chosen:
                running.suite = suite.name
                free_memory()
                try:
                    for row in suite.load()(**options):
                        refused += "refused" in row
                        typer.echo(rows.described(row))
                        if out is not None:
                            rows.append(out, rows.complete(row, suite.name, suite.runs_on(options), command, env))
                except Exception as error:
                    if len(chosen) == 1:
                        if (reason := _no_memory(error)) is None:
                            raise
                        raise CapacityError(f"{suite.name} needs more memory: {reason}. Give smaller sizes") from error
                    traceback.print_exc()
                    failed.append(suite.name)
    except KeyboardInterrupt:
        kept = f"{out} keeps the measured rows; --resume continues" if out is not None else "nothing was kept: no --out"
        typer.echo(f"stopped: {kept}", err=True)
        raise typer.Exit(130) from None
    if refused:
        typer.echo(f"measurements refused: {refused}", err=True)
    if failed:
        typer.echo(f"failed: {', '.join(failed)}; the reasons are above", err=True)
    if running.left:
        typer.echo(f"measurements left: {running.left}; the same command with --resume goes on", err=True)
    if refused or failed or running.left:
        raise typer.Exit(3 if running.left else 1)


@app.command()
def store(
    files: Annotated[list[Path], typer.Argument(help="Files that `refold bench run --out` wrote.")],
    results: Annotated[Path, typer.Option(help="The folder of results.")] = Path("benchmarks/results"),
) -> None:
    """Put rows where figures and tables find them: results/MACHINE/SUITE.jsonl.

    A row replaces the stored row of the same measurement. Afterwards, draw: refold bench plot.
    """
    _folder(results)
    found = rows.store([row for file in files for row in rows.read(file)], results)
    for path, (replaced, added, others) in found.items():
        typer.echo(f"{path}: {replaced} replaced, {added} added, {others} left as they were")


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="A file of rows.")],
    after: Annotated[Path, typer.Argument(help="Another file of rows.")],
) -> None:
    """Compare the times that two files have in common; a ratio above 1 means that the second is faster.

    "faster" and "slower" stand where the 20th to 80th percentiles of the two do not overlap, "same" where they do.
    """
    found = rows.compare(rows.read(before), rows.read(after))
    if not found:
        raise ArgumentError(f"{before} and {after} have no measurement in common. Compare runs of one suite")
    typer.echo(f"{'before ms':>11} {'after ms':>11} {'ratio':>7}")
    for name, which, verdict, a, b in found:
        typer.echo(f"{a:11.4f} {b:11.4f} {a / b:7.2f}  {verdict:6}  {name}: {which}")


@app.command()
def plot(
    names: Annotated[list[str] | None, typer.Argument(help="Figures; all by default.", show_default=False)] = None,
    results: Annotated[Path, typer.Option(help="The folder of results.")] = Path("benchmarks/results"),
    out: Annotated[Path, typer.Option(help="The folder of figures.")] = Path("docs/figures"),
    png: Annotated[bool, typer.Option("--png", help="Write PNG as well as SVG.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Draw nothing; fail if a figure is stale.")] = False,
) -> None:
    """Draw stored results. Figures without results are left out."""
    _folder(results)
    if check:
        if found := plots.stale(results, out):
            typer.echo(f"stale figures: {', '.join(found)}. Run refold bench plot", err=True)
            raise typer.Exit(1)
        return
    for name in names or plots.PLOTS:
        try:
            drawn = plots.draw(name, results, out, png)
        except OSError as error:
            raise ArgumentError(f"--out {out} cannot be written: {error.strerror}") from error
        for path in drawn:
            typer.echo(path)


@app.command("env")
def env_command() -> None:
    """Print the versions and devices on which measurements depend, as JSON."""
    typer.echo(json.dumps(rows.environment(), indent=2))


def _no_memory(error: Exception) -> str | None:
    """Read what an error says about memory that is used up, or None. Not all packages have a class for it."""
    import torch

    text = str(error)
    said = "can't allocate memory" in text or "RESOURCE_EXHAUSTED" in text  # PyTorch on the CPU, and JAX
    if said or isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        first = (text.splitlines() or ["out of memory"])[0].rpartition("DefaultCPUAllocator: ")[2]
        return first.split(". ")[0].rstrip(".")
    return None


def _folder(results: Path) -> None:
    if not results.is_dir():
        raise ArgumentError(f"{results} is not a folder. Run in the root of the repository, or give --results FOLDER")


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ArgumentError(f"--set {text}: give name=value")
    return name, value


def _text(default: object) -> str:
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default).lower()
