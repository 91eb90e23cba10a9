"""The last word on a rewritten graph: is it right as a whole, and is it the fastest? On copies of the user's inputs."""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from ...errors import CompileError, first_line, warn
from ...report import GraphReport
from ...report.text import between
from ...verify import Timing, median_ms, profile, race
from ...verify.memory import available_bytes, peak_bytes
from ...verify.timing import DELTA
from ..compile_time import ORIGINAL_S, RIVAL_S, unrolled_seconds
from ..inductor import Compiled, arguments, clone_inputs, inductor, standalone
from ..ir.captured_loop import unrolled_size
from ..ir.cost import Cost, calls_far_less, clearly_less
from ..ir.source import source_line
from ..options import Options
from ..private import TraceAgain, apart, tree_leaves
from ..recurrence.serial_chains import unrolled_operations
from ..refusals import refused
from .region import first_times, undisturbed_rng, with_backward
from .whole import compare

log = logging.getLogger("refold")

# A race may take this long.
TIMING_BUDGET_S = 20.0
# What takes longer than this, and is not the fastest, is timed no more often than it takes to know that.
SLOW_MS = 200.0
# What moves so many times fewer bytes than the original, and is so many times faster than eager, needs no other rival.
CLEARLY = 2


class Outcome(NamedTuple):
    """What a compile returns: the program that runs from now on, and what was decided about it and why."""

    program: Compiled
    report: GraphReport


@dataclass(frozen=True)
class Rewritten:
    """A graph that was rewritten and compiled.

    Attributes:
        run: The program.
        repeatable: Compiles it again, so that it draws the same random numbers as the original.
        terms: Number of terms in the longest sum that was rewritten.
        graph: What was compiled: Dynamo's graph, with operators in place of loops.
        original_s: How many seconds Inductor would take for the original, as estimated.
    """

    run: Compiled
    repeatable: Callable[[], Compiled]
    terms: int
    graph: GraphModule
    original_s: float


class Rival:
    """The original as Inductor compiles it, which is done at most once.

    Attributes:
        run: The program; None if it was not compiled, or Inductor cannot.
        seconds: What that took; None if there is no program.
    """

    def __init__(self, gm: GraphModule, inputs: Sequence[Any], options: Options) -> None:
        self.gm, self.inputs, self.options = gm, inputs, options
        self.run: Compiled | None = None
        self.seconds: float | None = None

    def compiled(self) -> tuple[dict[str, Compiled], list[str]]:
        """Return the program by its name, nothing if Inductor cannot make it, and what is to be said of that."""
        notes: list[str] = []
        if self.run is None:
            log.info("compiling the original with Inductor, to time it, too")
            start = time.perf_counter()
            try:
                # With symbolic sizes the baseline must be compiled for them too, in the context that knows them.
                dynamic = any(isinstance(x, torch.SymInt) for x in self.inputs)
                make = inductor if dynamic else standalone
                run = make(self.gm, self.inputs, options=self.options.inductor, notes=notes)
                with undisturbed_rng(), apart():
                    _trial(run, self.inputs)()
            except Exception as error:  # Inductor's failures have no common type
                return {}, [*notes, f"torch.compile alone fails on this graph: {first_line(error)}"]
            self.run, self.seconds = run, time.perf_counter() - start
        return {"torch.compile": self.run}, notes


def choose_program(
    rewritten: Rewritten, gm: GraphModule, inputs: Sequence[Any], options: Options, report: GraphReport, rival: Rival
) -> Outcome:
    """Compare a rewritten graph with the original, and race it against eager and plain Inductor.

    Args:
        rewritten: The rewritten graph.
        gm: The graph as it was.
        inputs: The values it was captured with; copies of them are used.
        options: What to require, and the options for Inductor.
        report: What is known: the rewrites that are applied, and what they save.
        rival: The original as Inductor compiles it.

    Returns:
        The fastest of the three, and never the rewritten graph if it differs from the original.
    """
    originals: dict[str, Compiled] = {}
    if 2 * max(row.largest_before for row in report.applied) < available_bytes(_device(inputs)):
        originals["eager"] = gm
    else:
        report = report.saying("eager was not timed: it does not fit in memory")
    seconds = unrolled_seconds(gm, report.mode, unrolled_operations(gm.graph))
    unrolled = seconds > RIVAL_S
    costly = rewritten.original_s > ORIGINAL_S and clearly_less(*_costs(report), CLEARLY)
    if "eager" in originals and unrolled:
        report = report.saying(
            f"torch.compile was not timed: compiling the unrolled loop would take about {seconds:.0f} s"
        )
    elif (options.accept == "faster" and (rival.run is not None or not costly)) or not originals:
        found, notes = rival.compiled()
        originals |= found
        report = report.saying(*notes)
    why = "graph-slower"
    wrong = ""
    if options.verify != "off":
        report, wrong = compared(rewritten, gm, originals, inputs, options, report)
    if wrong:
        # An unrolled loop of that length takes Inductor minutes.
        chosen = "eager" if unrolled and "eager" in originals else "inductor"
        why = "graph-differs"
        report = replace(report, chosen=chosen, reason=f"because the rewritten graph {wrong}")
        log.warning("refold: graph %d: %s runs, %s", report.index, report.runs, report.reason)
    elif options.accept == "faster":
        spared = costly and not unrolled and "torch.compile" not in originals
        report = _time_all(rewritten, gm, originals, inputs, report, rival if spared else None, peaks=not unrolled)
    report = replace(report, inductor_compile_s=rival.seconds)
    if report.chosen == "refold":
        return Outcome(rewritten.run, report)
    report = report.without(refused(why, report.reason.removeprefix("because ")))
    return Outcome(gm, report) if report.chosen == "eager" else plain(gm, inputs, options, report)


def plain(gm: GraphModule, inputs: Sequence[Any], options: Options, report: GraphReport) -> Outcome:
    """Compile a graph without rewrites; where Inductor cannot, it runs eagerly, and the report says why.

    Raises:
        CompileError: Inductor cannot, and ``strict`` is set.
    """
    notes: list[str] = []
    try:
        run = inductor(gm, inputs, options=options.inductor, notes=notes)
        return Outcome(run, report.saying(*notes))
    except TraceAgain:
        raise
    except Exception as error:  # Inductor's failures have no common type
        report = report.saying(*notes, left_eager(error, gm, options, report))
        return Outcome(gm, replace(report, chosen="eager", reason=f"because Inductor failed: {first_line(error)}"))


def left_eager(error: Exception, gm: GraphModule, options: Options, report: GraphReport) -> str:
    """Warn that a graph that Inductor cannot compile runs eagerly; return the note of it.

    Raises:
        CompileError: ``strict`` is set.
    """
    what, hint = first_line(error), _values_decide(error, gm)
    if options.strict:
        after = f", after the rewritten graph was left {report.reason}" if report.reason else ""
        raise CompileError(f"Inductor cannot compile graph {report.index} ({what}){after}{hint}") from error
    warn(f"Inductor failed on this graph ({what}); it runs eagerly{hint}")
    return f"Inductor failed ({what}); the graph runs eagerly{hint}"


def _values_decide(error: Exception, gm: GraphModule) -> str:
    """Say where and what to do, if what PyTorch cannot trace is a size or a decision that only numbers tell."""
    if not type(error).__name__.startswith(("DynamicOutputShape", "DataDependentOutput")):
        return ""
    calls = [node for node in gm.graph.nodes if node.op.startswith("call")]
    kinds = [
        (
            "Write `h = torch.where(mask, y, h)` instead of `h[mask] = y`, which selects as many elements as are true.",
            [node for node in calls if node.target in (operator.setitem, operator.getitem) and _selects(node.args[1])],
        ),
        (
            "Write a loop over a fixed number of steps: how many steps a `while_loop` takes only a run tells.",
            [node for node in calls if getattr(node.target, "__name__", "") == "while_loop"],
        ),
    ]
    found = [(remedy, nodes[0]) for remedy, nodes in kinds if nodes]
    return "".join(f". At {source_line(node)}: {remedy}" for remedy, node in found[:1])


def _selects(index: Any) -> bool:
    """Tell whether an index selects elements by truth values."""
    examples = (x.meta.get("example_value") for x in tree_leaves(index) if isinstance(x, Node))
    return any(isinstance(x, torch.Tensor) and x.dtype is torch.bool for x in examples)


def compared(
    rewritten: Rewritten, gm: GraphModule, originals: dict[str, Compiled], inputs: Sequence[Any], options: Options,
    report: GraphReport,
) -> tuple[GraphReport, str]:  # fmt: skip
    """Compare a program with the original; return the report with that, and what is wrong with the program."""
    log.info("checking the whole graph")
    own = next(iter(originals.values()), None)

    def control() -> Compiled:
        return inductor(gm, inputs, options={**options.inductor, "fallback_random": True})

    with undisturbed_rng(), apart():
        found = compare(rewritten.run, gm, own, inputs, rewritten.terms, rewritten.repeatable, control)
    report = replace(report, checked_against=found.against, checks=tuple(vars(one) for one in found.results))
    if "eager" in originals:
        report = replace(report, difference_from_eager=found.difference)
    if found.against not in ("float64", "float32"):
        what = f"only compared with {found.against}" if found.against else "not checked as a whole, only its regions"
        report = report.saying(f"the graph was {what}: {found.note}")
    elif found.note:
        report = report.saying(found.note)
    return report, f"differs from the original: {found.reason}" if found.reason else ""


def _time_all(
    rewritten: Rewritten, gm: GraphModule, originals: dict[str, Compiled], inputs: Sequence[Any], report: GraphReport,
    spared: Rival | None, *, peaks: bool,
) -> GraphReport:  # fmt: skip
    """Race a program against the originals; return the report with their times, and with which is to run.

    Args:
        rewritten: The program.
        gm: The graph as it was.
        originals: What it is raced against.
        inputs: The values the graph was captured with; copies of them are used.
        report: What is known.
        spared: Plain Inductor, whose compile is long; raced only if the program is not clearly faster than eager. None
            if nothing was spared.
        peaks: Whether peaks of memory are taken on the CPU, too.
    """
    device = _device(inputs)
    ours = _trial(rewritten.run, inputs)
    if not originals:
        with undisturbed_rng(), apart():
            return replace(report, times_ms={"refold": median_ms(ours, device)})
    log.info("timing the whole graph against the original")
    rivals, first, name, result = _raced(originals, ours, inputs, device)
    if spared is not None and result.speedup < CLEARLY:
        found, notes = spared.compiled()
        report = report.saying(*notes)
        rivals, first, name, result = _raced({**originals, **found}, ours, inputs, device)
    elif spared is not None:
        report = report.saying(
            f"torch.compile was not timed: compiling the original would take about {rewritten.original_s:.0f} s, and "
            "the rewritten graph moves less than half of the bytes and takes less than half of the time of eager"
        )
    times: dict[str, float] = {}
    memory: dict[str, int] = {}
    kernels: dict[str, list[dict[str, Any]]] = {}
    with undisturbed_rng(), apart():
        for other, run in rivals.items():
            slow = first[other] > SLOW_MS
            times[other] = result.base_ms if other == name else first[other] if slow else median_ms(run, device)
            # On the CPU memory is traced operation by operation, which takes a long loop many times its run time.
            if peaks or device.type != "cpu":
                memory[other] = peak_bytes(run, device)
        times["refold"], memory["refold"] = result.candidate_ms, peak_bytes(ours, device)
        for who, run in {**rivals, "refold": ours}.items():
            if launched := profile.take(f"graph {report.index}: {who}", run, device):
                kernels[who] = launched
    report = replace(
        report,
        times_ms=times,
        peak_bytes=memory,
        kernels=kernels,
        speedup=result.speedup,
        speedup_at_least=result.at_least,
        speedup_at_most=result.at_most,
        busy=result.busy,
        provisional=bool(result.busy) and not result.faster,
    )
    calls = unrolled_size(rewritten.graph), unrolled_size(gm)
    if result.open and (aside := _load_aside(report, result, calls if name == "eager" else None)):
        return replace(report, reason=f"because the machine was too busy to tell, and {aside}")
    if result.faster:
        return report
    return replace(
        report,
        chosen="eager" if name == "eager" else "inductor",
        reason=f"because the rewritten graph is not measurably faster than {name}: "
        f"{between(result.at_least, result.at_most)}, must exceed {1 + DELTA:.2f}x for certain",
    )


def _load_aside(report: GraphReport, result: Timing, calls: tuple[int, int] | None) -> str:
    """Say what speaks for a program that does not depend on what else the machine does; empty if nothing does.

    Args:
        report: The report, with what the program and the original cost.
        result: A race that decided nothing.
        calls: How many calls the program and the original make, if the original runs call by call.
    """
    if result.fastest < 1:
        return ""
    if result.fastest > CLEARLY:
        return f"the fastest call of the original takes {result.fastest:.1f} times as long as its own"
    if clearly_less(*_costs(report)):
        return f"it moves {report.bytes_before / max(report.bytes_after, 1):.0f} times fewer bytes"
    if calls is not None and calls_far_less(*calls):
        return f"it makes {calls[0]} calls, and eager {calls[1]}"
    return ""


def _raced(
    originals: dict[str, Compiled], ours: Callable[[], object], inputs: Sequence[Any], device: torch.device
) -> tuple[dict[str, Callable[[], object]], dict[str, float], str, Timing]:
    """Race a program against the fastest of the originals; return all calls, their times, its name, and the race."""
    rivals = {name: _trial(run, inputs) for name, run in originals.items()}
    with undisturbed_rng(), apart():
        ours()
        times = first_times(rivals, device)
        name = min(times, key=times.__getitem__)
        return rivals, times, name, race(rivals[name], ours, device, budget_s=TIMING_BUDGET_S, patient=False)


def _costs(report: GraphReport) -> tuple[Cost, Cost]:
    """Count the costs of the rewritten graph and of the original."""
    return Cost(report.flops_after, report.bytes_after), Cost(report.flops_before, report.bytes_before)


def _device(inputs: Sequence[Any]) -> torch.device:
    devices = [x.device for x in inputs if isinstance(x, torch.Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _trial(run: Compiled, inputs: Sequence[Any]) -> Callable[[], object]:
    """Return a call on copies of the inputs, with backward where the outputs ask for it."""
    own = clone_inputs(inputs)
    return with_backward(lambda: run(*arguments(own, inputs)), own)
