"""The command line: ``refold optimize | explain | generate | doctor``.

Progress goes to standard error, live on a terminal and as plain lines in a pipe; the report goes
to standard output. Bad input gives one sentence and exit code 2.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from . import __version__
from .errors import MissingDependency, RefoldError
from .generate.cli import generate

if TYPE_CHECKING:
    from .report import Report

app = typer.Typer(
    help="Find what is wasteful in a PyTorch layer, rewrite it, prove it, measure it; generate text from a checkpoint.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Target = Annotated[
    str, typer.Argument(help="A KernelBench-style Python file, or package.module:factory.", show_default=False)
]
Device = Annotated[str, typer.Option(help="Where to run: cpu, cuda, cuda:1, ...")]
Dtype = Annotated[str, typer.Option(help="float32, float16, bfloat16 or float64.")]
Seed = Annotated[int, typer.Option(help="Seeds parameters and inputs.")]
Json = Annotated[Path | None, typer.Option("--json", help="Also write the report to this file.", show_default=False)]


@app.command()
def optimize(
    target: Target,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    seed: Seed = 0,
    json: Json = None,
    verify: Annotated[str, typer.Option(help="quick: prove each rewrite against float64; off: trust it.")] = "quick",
    accept: Annotated[str, typer.Option(help="faster: keep only what is measured to be; always: keep all.")] = "faster",
    train: Annotated[bool, typer.Option("--train", help="Optimize forward and backward together.")] = False,
) -> None:
    """Rewrite a layer, prove each rewrite, measure the result, print the evidence."""
    _check_writable(json)
    with _stages("loading"):
        torch = _torch()
        from . import targets
        from .compiler.backend import compile as refold_compile

        module, inputs = targets.load(target, device=device, dtype=dtype, seed=seed)
        compiled = refold_compile(module.train(train), verify=verify, accept=accept)
        with torch.set_grad_enabled(train):
            targets.forward(target, module, inputs, compiled)
        report: Report = compiled.report
        report.target = target
    _finish(report, json)


@app.command()
def explain(
    target: Target, device: Device = "cpu", dtype: Dtype = "float32", seed: Seed = 0, json: Json = None
) -> None:
    """List what is wasteful in a layer and why; change nothing."""
    _check_writable(json)
    with _stages("loading"):
        torch = _torch()
        from . import targets
        from .compiler.backend import explain as refold_explain

        module, inputs = targets.load(target, device=device, dtype=dtype, seed=seed)
        reports: list[Report] = []
        with torch.no_grad():
            targets.forward(target, module, inputs, lambda *given: reports.append(refold_explain(module, *given)))
        (report,) = reports
        report.target = target
    _finish(report, json)


app.command()(generate)


@app.command()
def doctor(
    audit: Annotated[
        bool, typer.Option("--audit", help="Check the scan packages installed here against float64.")
    ] = False,
) -> None:
    """Print versions, devices, and which parts are usable, with reasons."""
    from .doctor import examine

    console = Console()
    for section, lines in examine().items():
        console.print(f"[bold]{section}[/bold]")
        for name, text in lines.items():
            console.print(f"  {name:14} {text}", highlight=False, markup=False, soft_wrap=True)
    if audit:
        from .audit import audit as check

        console.print("[bold]audit[/bold]")
        findings = check()
        for finding in findings:
            console.print(f"  {finding}", highlight=False, markup=False, soft_wrap=True)
        if any(finding.verdict == "wrong" for finding in findings):
            raise typer.Exit(1)


@app.callback(invoke_without_command=True)
def _top(
    version: Annotated[bool, typer.Option("--version", help="Print the version and end.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(f"refold {__version__}")
        raise typer.Exit


def _torch() -> Any:
    """Return PyTorch, or say how to get it."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingDependency(
            "this command needs PyTorch, which is not installed (pip install 'refold[torch]')"
        ) from error
    return torch


def _check_writable(json: Path | None) -> None:
    """Refuse a file that cannot be written before there is anything to write."""
    if json is None:
        return
    if json.is_dir():
        raise _Refusal(f"--json {json} cannot be written: it is a directory")
    if not json.parent.is_dir():
        raise _Refusal(f"--json {json} cannot be written: the directory {json.parent} does not exist")
    if not os.access(json if json.exists() else json.parent, os.W_OK):
        raise _Refusal(f"--json {json} cannot be written: permission denied")


def _finish(report: Report, json: Path | None) -> None:
    typer.echo(str(report))
    if json is not None:
        try:
            json.write_text(report.to_json() + "\n")
        except OSError as error:
            raise _Refusal(f"--json {json} cannot be written: {error.strerror}") from error


class _Refusal(RefoldError):
    """The command line asks for something that cannot be done."""


class _Progress(logging.Handler):
    """Shows what the compiler logs: in place on a terminal, a line each in a pipe."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self.console = console
        self.status = console.status("") if console.is_terminal else None

    def emit(self, record: logging.LogRecord) -> None:
        self.say(record.getMessage())

    def say(self, text: str) -> None:
        if self.status is not None:
            self.status.update(text)
        else:
            self.console.print(f"... {text}", highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _stages(first: str) -> Iterator[None]:
    """Show progress while a command works."""
    progress = _Progress(Console(stderr=True))
    log = logging.getLogger("refold")
    level = log.level
    log.addHandler(progress)
    log.setLevel(logging.INFO)
    try:
        if progress.status is not None:
            progress.status.start()
        progress.say(first)
        yield
    finally:
        if progress.status is not None:
            progress.status.stop()
        log.removeHandler(progress)
        log.setLevel(level)


def main() -> None:
    """Run the command line; refold's own errors become one sentence and exit code 2."""
    try:
        app()
    except RefoldError as error:
        typer.echo(f"refold: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
