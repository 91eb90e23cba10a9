"""The command line: ``refold optimize | explain | verify | apply | generate | bench | doctor``.

Progress goes to standard error, live on a terminal and as plain lines in a pipe; the report goes
to standard output. Bad input gives one sentence and exit code 2.
"""

from __future__ import annotations

import json as json_module
import logging
import math
import os
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import __version__
from .errors import MissingDependency, RefoldError, printable
from .generate.cli import generate

if TYPE_CHECKING:
    from rich.console import Console

    from .report import Report

app = typer.Typer(
    help="Make recurrent PyTorch layers faster: find waste, rewrite, check, measure. Generate text from a checkpoint.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Target = Annotated[
    str, typer.Argument(help="A file with Model and get_inputs(), or package.module:factory.", show_default=False)
]
Device = Annotated[str, typer.Option(help="Where to run: cpu, cuda, cuda:1, ...")]
TrialDevice = Annotated[str, typer.Option(help="Where to run: cpu or cuda.")]
Dtype = Annotated[str, typer.Option(help="float32, float16, bfloat16 or float64.")]
Seed = Annotated[int, typer.Option(help="Seed of parameters and inputs.")]
Json = Annotated[
    Path | None,
    typer.Option("--json", help="Also write the report as JSON; - prints it instead of the text.", show_default=False),
]
Html = Annotated[
    Path | None, typer.Option("--html", help="Also write the report as one page with pictures.", show_default=False)
]
Trace = Annotated[
    Path | None,
    typer.Option("--trace", help="Also write a Chrome trace of original and result, for Perfetto.", show_default=False),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Keep all lines of progress, with their times.")]


UNSANDBOXED = "--allow-unsandboxed"
FORMS = "rules (the compiler), search, file:PATH, command:COMMAND, replay:FOLDER, openai:MODEL or anthropic:MODEL"


def _proposals(text: str, *names: str, **options: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="Proposals", **options)


# Options of optimize that only its proposals have, and those that they do not have.
_PROPOSING = ("run", "resume", "base_url", "level", "parallel", "rounds", "seconds", "tokens", "money", "price",
              "allow_unsandboxed")  # fmt: skip
_COMPILING = ("seed", "json", "html", "trace", "verify", "rules")


@app.command()
def optimize(
    context: typer.Context,
    target: Target,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    seed: Seed = 0,
    json: Json = None,
    html: Html = None,
    trace: Trace = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    verify: Annotated[str, typer.Option(help="quick: check each rewrite against float64; off: no checks.")] = "quick",
    accept: Annotated[
        str, typer.Option(help="faster: keep only what is measured to be faster; always: keep all that is right.")
    ] = "faster",
    rules: Annotated[Path | None, typer.Option(help="Rules to apply: a file or a folder.")] = None,
    train: Annotated[bool, typer.Option("--train", help="Optimize forward and backward together.")] = False,
    propose: Annotated[str, _proposals(f"Who proposes: {FORMS}.")] = "rules",
    base_url: Annotated[str, _proposals("The endpoint of openai:MODEL or anthropic:MODEL.")] = "",
    run: Annotated[Path | None, _proposals("Folder for the record of proposals.", show_default=False)] = None,
    resume: Annotated[bool, _proposals("Continue the run in the folder of --run.", "--resume")] = False,
    level: Annotated[str, _proposals("How proposals are tried: quick, full or paranoid.")] = "full",
    parallel: Annotated[int, _proposals("Proposals per request.")] = 1,
    rounds: Annotated[int, _proposals("Most requests to the proposer.")] = 4,
    seconds: Annotated[float, _proposals("Most seconds for the whole run.")] = 1800.0,
    tokens: Annotated[float, _proposals("Most tokens for the whole run.")] = float("inf"),
    money: Annotated[float, _proposals("Most money for the whole run, computed by --price.")] = float("inf"),
    price: Annotated[tuple[float, float], _proposals("Prices of a million tokens: input, output.")] = (0.0, 0.0),
    allow_unsandboxed: Annotated[bool, _proposals("Try sources even without a sandbox.", UNSANDBOXED)] = False,
) -> None:
    """Rewrite a layer, check each rewrite, measure the result, print the evidence.

    With --propose, a proposer suggests replacements. Each is tried against the original; sources run in a sandbox.
    """
    if propose != "rules":
        from .propose import Budget

        _refuse_given(context, _COMPILING, "does not go with --propose")
        if not min(price) >= 0:
            raise _Refusal(f"--price is {price[0]:g} {price[1]:g}. Give two prices, 0 or more")
        if money < math.inf and not any(price):
            raise _Refusal("--money needs --price, by which it is computed")
        budget = Budget(rounds, seconds, tokens, money)
        _search(
            target, propose, base_url, price, run, budget, parallel=parallel, resume=resume, level=level,
            accept="right" if accept == "always" else accept, dtype=dtype, device=device, train=train,
            allow_unsandboxed=allow_unsandboxed, quiet=quiet, verbose=verbose,
        )  # fmt: skip
        return
    _refuse_given(context, _PROPOSING, "goes with --propose")
    for option, path in (("--json", json), ("--html", html), ("--trace", trace)):
        _check_writable(path, option)
    pictures = html is not None or trace is not None
    with _stages(quiet, verbose):
        torch = _torch()
        from . import targets
        from .compiler.backend import compile as refold_compile
        from .verify.profile import named_loops, profiling

        module, inputs = targets.load(target, device=device, dtype=dtype, seed=seed)
        # What is remembered from before is not run again, and could not be profiled.
        told: dict[str, Any] = {"cache": False, "options": named_loops()} if pictures else {}
        compiled = refold_compile(module.train(train), verify=verify, accept=accept, rules=rules, **told)
        with torch.set_grad_enabled(train), profiling() if pictures else nullcontext() as profiles:
            targets.check_runs(target, module, inputs)
            compiled(*inputs)
        report: Report = compiled.report
        report.target = target
        report.environment |= {"device": device, "dtype": dtype}
        if html is not None:
            from .verify.ceilings import ceilings

            logging.getLogger("refold").info("measuring the copy and matrix rates of the device")
            report.ceilings = ceilings(torch.device(device), targets.DTYPES[dtype])
    _finish(report, json, html)
    if trace is not None and profiles is not None:
        with _writing("--trace", trace):
            profiles.save(trace)


@app.command()
def explain(
    target: Target,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    seed: Seed = 0,
    json: Json = None,
    html: Html = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """List what is wasteful in a layer, and why. Nothing is changed."""
    _check_writable(json)
    _check_writable(html, "--html")
    with _stages(quiet, verbose):
        torch = _torch()
        from . import targets
        from .compiler.backend import explain as refold_explain

        module, inputs = targets.load(target, device=device, dtype=dtype, seed=seed)
        with torch.no_grad():
            targets.check_runs(target, module, inputs)
            report = refold_explain(module, *inputs)
        report.target = target
        report.environment |= {"device": device, "dtype": dtype}
    _finish(report, json, html)


@app.command()
def verify(
    original: Annotated[
        str, typer.Argument(help="A file with Model and get_inputs(), file.py:name, definition.json.")
    ] = "",
    candidate: Annotated[str, typer.Argument(help="A file with ModelNew, file.py:name, or solution.json.")] = "",
    level: Annotated[str, typer.Option(help="quick: seconds; full: up to a minute; paranoid: minutes.")] = "full",
    dtype: Dtype = "float32",
    device: TrialDevice = "cpu",
    train: Annotated[bool, typer.Option("--train", help="Compare and time gradients as well.")] = False,
    accept: Annotated[str, typer.Option(help="faster, or right: speed does not count.")] = "faster",
    nonfinite: Annotated[
        str,
        typer.Option(help="strict: NaN and infinities must be where the original has them; finite-only: a note."),
    ] = "finite-only",
    tried: Annotated[int, typer.Option(help="How many candidates were tried; they share the chance of error.")] = 1,
    rival: Annotated[
        str,
        typer.Option(help="Baseline: eager, or best: the faster of eager and torch.compile (not at level quick)."),
    ] = "best",
    timeout: Annotated[float, typer.Option(help="Seconds that loading or one call may take.")] = 60.0,
    limit: Annotated[float, typer.Option(help="Seconds for the whole trial; 0: what the level allows.")] = 0.0,
    allow_unsandboxed: Annotated[
        bool, typer.Option("--allow-unsandboxed", help="Run the candidate even without a sandbox.")
    ] = False,
    log: Annotated[
        Path | None,
        typer.Option(help="Write one line of JSON per check; - prints them instead of the text.", show_default=False),
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(help="Repeat the trial that a log recorded.", show_default=False)
    ] = None,
    workload: Annotated[
        Path | None, typer.Option(help="Workloads for definition.json; else sizes are drawn.", show_default=False)
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write the traces of definition.json and solution.json.", show_default=False)
    ] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Decide whether an untrusted candidate may replace the original.

    Exit code 0: accepted. 1: refused. 3: could not be judged. 2: wrong options, files or an error.
    """
    if (replay is None) != bool(original and candidate):
        raise _Refusal("verify needs ORIGINAL and CANDIDATE, or --replay LOG alone")
    _check_writable(log, "--log")
    _check_writable(trace, "--trace")
    if not str(original).endswith(".json") and (workload or trace):
        raise _Refusal("--workload and --trace go with a definition and a solution in JSON")
    with _stages(quiet, verbose):
        if sys.platform == "linux":
            from . import early

            early.start(level)
        _torch()
        from . import judge

        options: dict[str, Any] = {
            "level": level, "device": device, "train": train, "accept": accept, "nonfinite": nonfinite, "tried": tried,
            "rival": rival, "timeout": timeout, "limit": limit, "allow_unsandboxed": allow_unsandboxed,
        }  # fmt: skip
        then, traces = None, []
        if replay is not None:
            verdict, then = judge.replay(replay, allow_unsandboxed=allow_unsandboxed)
        elif judge.exchange.is_exchange(original, candidate):
            for found in judge.judge_solution(original, candidate, workload, **options):
                verdict = found[0]
                traces.append(found[1])
        else:
            verdict = judge.judge(original, candidate, dtype=dtype, **options)
    if trace is not None:
        _write("--trace", trace, "".join(json_module.dumps(each) + "\n" for each in traces))
    if log is not None and str(log) != "-":
        _write("--log", log, verdict.to_jsonl())
    typer.echo(str(verdict) if str(log) != "-" else verdict.to_jsonl().rstrip())
    if then is not None and str(log) != "-":
        same = (verdict.outcome, verdict.check) == (then.outcome, then.check)
        earlier = printable(f"{then.outcome} {then.check} {then.reason}".rstrip())
        typer.echo("  then         " + ("the same" if same else earlier))
    raise typer.Exit(verdict.exit_code)


@app.command()
def apply(
    run: Annotated[Path, typer.Argument(help="The folder of a run of optimize --propose.")],
    save: Annotated[
        Path | None, typer.Option(help="Folder to keep it in, with evidence and guards.", show_default=False)
    ] = None,
) -> None:
    """Show what a run accepted, and keep it where it can be used.

    Use a rule by refold.compile(rules=...), and a plan by refold.compile(choose=...); both are checked again. Use a
    source by refold.propose.guarded, for inputs like those that it was tried on.
    """
    _torch()
    from .propose import applied, protocol

    kind, file = applied.accepted(run)
    typer.echo(printable(file.read_text(errors="replace").rstrip(), lines=True))
    evidence = (run / "accepted.jsonl").read_text().splitlines()
    last = json_module.loads(evidence[-1])
    timing = last.get("timing", last)
    speed = protocol.speed(timing.get("speedup"), timing.get("at_least"))
    typer.echo(f"\n{kind}: {speed}; evidence: {run / 'accepted.jsonl'}")
    for note in last.get("notes", []):
        typer.echo(f"note: {printable(str(note))}")
    if save is not None:
        typer.echo(f"kept as {applied.save(run, save)}")


app.command(help="Generate text from a checkpoint, and print it as it is made.")(generate)


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(context: typer.Context) -> None:
    """Run benchmarks, and compare and draw their results."""
    from .bench.cli import app as suites  # with all suites, it takes longer to import than all else together

    suites(context.args, prog_name="refold bench")


@app.command()
def doctor(
    audit: Annotated[
        bool, typer.Option("--audit", help="Check the scan packages installed here against float64.")
    ] = False,
    warm: Annotated[
        str,
        typer.Option(help="Only compile what a model needs, for later processes: a folder, a hub name, or sizes."),
    ] = "",
) -> None:
    """Print versions and devices, and which parts of refold can run here."""
    if warm:
        _torch()
        from .warm import warm as compile_beforehand

        began = time.perf_counter()
        for line in compile_beforehand(warm):
            typer.echo(f"{time.perf_counter() - began:6.1f} s  {line}")
        return
    from .doctor import examine

    for section, lines in examine().items():
        typer.secho(section, bold=True)
        for name, text in lines.items():
            typer.echo(f"  {name:14} {text}")
    if audit:
        from .audit import audit as check

        typer.secho("audit", bold=True)
        wrong = False
        for finding in check():
            typer.echo(f"  {finding}")
            wrong |= finding.verdict == "wrong"
        if wrong:
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


def _search(
    target: str, propose: str, base_url: str, price: tuple[float, float], run: Path | None, budget: Any, quiet: bool,
    verbose: bool, **options: Any,
) -> None:  # fmt: skip
    """Let a proposer suggest replacements for a file, and print what was accepted."""
    if run is None:
        raise _Refusal("--propose needs --run FOLDER, where the record is kept")
    if ":" in target:
        raise _Refusal(f"--propose takes a Python file with Model and get_inputs(), not {target}")
    with _stages(quiet, verbose):
        _torch()
        from . import judge
        from . import propose as proposers

        names = ("level", "accept", "dtype", "device", "train")
        threads = judge.threads(options["level"])
        terms = judge.Terms(**{name: options.pop(name) for name in names}, threads=threads)
        original = judge.program(target, role="original")
        proposer = proposers.proposer(propose, base_url=base_url, prices=price)
        if proposer.destination:
            said = "sending the source of %s, the verdicts and the facts of this machine to %s"
            logging.getLogger("refold").info(said, target, proposer.destination)
        found = proposers.search(original, proposer, run, terms, budget=budget, **options)
    typer.echo(printable(str(found), lines=True))
    raise typer.Exit(0 if found.accepted else 1)


def _refuse_given(context: typer.Context, names: Iterable[str], why: str) -> None:
    """Refuse options that were given and would have no effect."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise _Refusal(f"--{name.replace('_', '-')} {why}")


def _check_writable(path: Path | None, option: str = "--json") -> None:
    """Refuse a file that cannot be written before there is anything to write."""
    if path is None or (str(path) == "-" and option in ("--json", "--log")):
        return
    if str(path) == "-":
        raise _Refusal(f"{option} needs a file; only --json and --log can be printed to standard output")
    if path.is_dir():
        raise _Refusal(f"{option} {path} cannot be written: it is a directory")
    if not path.parent.is_dir():
        raise _Refusal(f"{option} {path} cannot be written: the directory {path.parent} does not exist")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise _Refusal(f"{option} {path} cannot be written: permission denied")


def _finish(report: Report, json: Path | None, html: Path | None) -> None:
    """Print a report, and write it to files. What is printed is not lost if a file cannot be written."""
    if str(json) == "-":
        typer.echo(report.to_json())
    else:
        typer.echo(str(report))
        if json is not None:
            _write("--json", json, report.to_json() + "\n")
    if html is not None:
        _write("--html", html, report.to_html())


def _write(option: str, path: Path, text: str) -> None:
    with _writing(option, path):
        path.write_text(text, encoding="utf-8")


@contextmanager
def _writing(option: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _Refusal(f"{option} {path} cannot be written: {error.strerror}") from error


class _Refusal(RefoldError):
    """The command line asks for something that cannot be done."""


class _Progress(logging.Handler):
    """Shows what the compiler logs: in place on a terminal, one line each in a pipe, with its time if ``verbose``."""

    def __init__(self, console: Console, verbose: bool) -> None:
        super().__init__(logging.INFO)
        self.console, self.start = console, time.perf_counter() if verbose else None
        self.status = console.status("") if console.is_terminal and not verbose else None

    def emit(self, record: logging.LogRecord) -> None:
        self.say(record.getMessage())

    def say(self, text: str) -> None:
        if self.status is not None:
            from rich.markup import escape

            self.status.update(escape(printable(text)))
        else:
            mark = "..." if self.start is None else f"{time.perf_counter() - self.start:8.2f} s "
            self.console.print(f"{mark} {printable(text)}", highlight=False, markup=False, emoji=False, soft_wrap=True)


@contextmanager
def _stages(quiet: bool, verbose: bool) -> Iterator[None]:
    """Show progress while a command works."""
    if quiet and verbose:
        raise _Refusal("--quiet and --verbose exclude each other")
    from rich.console import Console

    log, progress = logging.getLogger("refold"), _Progress(Console(stderr=True), verbose)
    level = log.level
    log.setLevel(logging.ERROR if quiet else logging.INFO)  # the report has all that is worth a warning
    log.addHandler(progress)
    try:
        if progress.status is not None and not quiet:
            progress.status.start()
        if not quiet:
            progress.say("loading")
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
        typer.echo(f"refold: {printable(str(error), lines=True)}", err=True)
        sys.exit(2)
    except Exception:  # 1 is that of a candidate that is refused
        traceback.print_exc()
        sys.exit(2)


if __name__ == "__main__":
    main()
