"""The last word on a rewritten graph: is it right as a whole, and is it the fastest? On copies of the user's inputs."""

from __future__ import annotations

import functools
import logging
import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ...errors import CompileError, warn
from ...report import GraphReport
from ...report.text import between
from ...verify import Race, median_ms, profile, race
from ...verify.memory import available_bytes, peak_bytes
from ...verify.timing import DELTA
from ..compile_time import ORIGINAL_S, RIVAL_S, unrolled_seconds
from ..inductor import Compiled, arguments, clone_inputs, first_line, inductor, standalone
from ..ir.captured_loop import unrolled_size
from ..ir.cost import Cost, calls_far_less, clearly_less
from ..ir.source import source_line
from ..options import Options
from ..private import TraceAgain, apart, tree_leaves
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


def choose_program(
    rewritten: Rewritten,
    gm: GraphModule,
    inputs: Sequence[Any],
    options: Options,
    entry: GraphReport,
    compiled: dict[str, Compiled],
) -> Compiled:
    """Compare a rewritten graph with the original, race it against eager and plain Inductor, and record both.

    Args:
        rewritten: The rewritten graph.
        gm: The graph as it was.
        inputs: The values it was captured with; copies of them are used.
        options: What to require, and the options for Inductor.
        entry: The report to write into.
        compiled: The original as Inductor compiled it, if it did; gets it otherwise.

    Returns:
        What is to run: the fastest of the three, and never the rewritten graph if it differs from the original.
    """
    originals: dict[str, Compiled] = {}
    if 2 * max(row.largest_before for row in entry.applied) < available_bytes(_device(inputs)):
        originals["eager"] = gm
    else:
        entry.notes.append("eager was not timed: it does not fit in memory")
    seconds = unrolled_seconds(gm, entry.mode)
    unrolled = seconds > RIVAL_S
    costly = rewritten.original_s > ORIGINAL_S and clearly_less(*_costs(entry), CLEARLY)
    if "eager" in originals and unrolled:
        entry.notes.append(f"torch.compile was not timed: compiling the unrolled loop would take about {seconds:.0f} s")
    elif (options.accept == "faster" and (compiled or not costly)) or not originals:
        _add_plain(originals, gm, inputs, options, entry, compiled)
    why = "graph-slower"
    if options.verify != "off" and (reason := compared(rewritten, gm, originals, inputs, options, entry)):
        # An unrolled loop of that length takes Inductor minutes.
        entry.chosen = "eager" if unrolled and "eager" in originals else "inductor"
        entry.reason = f"because the rewritten graph {reason}"
        why = "graph-differs"
        log.warning("refold: graph %d: %s runs, %s", entry.index, entry.runs, entry.reason)
    elif options.accept == "faster":
        spared = costly and not unrolled and "torch.compile" not in originals
        add = functools.partial(_add_plain, originals, gm, inputs, options, entry, compiled) if spared else None
        _time_all(rewritten, gm, originals, inputs, entry, add, peaks=not unrolled)
    if entry.chosen == "refold":
        return rewritten.run
    for row in entry.applied:
        row.status, row.reason = "refused", refused(why, entry.reason.removeprefix("because "))
    return gm if entry.chosen == "eager" else plain(gm, inputs, options, entry)


def plain(gm: GraphModule, inputs: Sequence[Any], options: Options, entry: GraphReport) -> Compiled:
    """Compile a graph without rewrites; where Inductor cannot, it runs eagerly, and the report says why.

    Raises:
        Exception: Inductor's own, if ``strict`` is set.
    """
    try:
        return inductor(gm, inputs, options=options.inductor, notes=entry.notes)
    except TraceAgain:
        raise
    except Exception as error:  # Inductor's failures have no common type
        left_eager(error, gm, options, entry)
        entry.chosen, entry.reason = "eager", f"because Inductor failed: {first_line(error)}"
        return gm


def left_eager(error: Exception, gm: GraphModule, options: Options, entry: GraphReport) -> None:
    """Say that a graph that Inductor cannot compile runs eagerly.

    Raises:
        CompileError: ``strict`` is set.
    """
    what, hint = first_line(error), _values_decide(error, gm)
    if options.strict:
        after = f", after the rewritten graph was left {entry.reason}" if entry.reason else ""
        raise CompileError(f"Inductor cannot compile graph {entry.index} ({what}){after}{hint}") from error
    warn(f"Inductor failed on this graph ({what}); it runs eagerly{hint}")
    entry.notes.append(f"Inductor failed ({what}); the graph runs eagerly{hint}")


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
    rewritten: Rewritten,
    gm: GraphModule,
    originals: dict[str, Compiled],
    inputs: Sequence[Any],
    options: Options,
    entry: GraphReport,
) -> str:
    """Compare a program with the original, and record it; return what is wrong with it."""
    log.info("checking the whole graph")
    own = next(iter(originals.values()), None)

    def control() -> Compiled:
        return inductor(gm, inputs, options={**options.inductor, "fallback_random": True})

    with undisturbed_rng(), apart():
        found = compare(rewritten.run, gm, own, inputs, rewritten.terms, rewritten.repeatable, control)
    entry.checked_against = found.against
    entry.checks = [vars(one) for one in found.results]
    if "eager" in originals:
        entry.difference_from_eager = found.difference
    if found.against not in ("float64", "float32"):
        what = f"only compared with {found.against}" if found.against else "not checked as a whole, only its regions"
        entry.notes.append(f"the graph was {what}: {found.note}")
    elif found.note:
        entry.notes.append(found.note)
    return f"differs from the original: {found.reason}" if found.reason else ""


def _time_all(
    rewritten: Rewritten,
    gm: GraphModule,
    originals: dict[str, Compiled],
    inputs: Sequence[Any],
    entry: GraphReport,
    add: Callable[[], None] | None,
    *,
    peaks: bool,
) -> None:
    """Race a program against the originals, and record which is to run.

    Args:
        rewritten: The program.
        gm: The graph as it was.
        originals: What it is raced against.
        inputs: The values the graph was captured with; copies of them are used.
        entry: The report to write into.
        add: Adds plain Inductor, whose compile is long, to the originals; called only if the program is not clearly
            faster than eager. None if nothing was spared.
        peaks: Whether peaks of memory are taken on the CPU, too.
    """
    device = _device(inputs)
    ours = _trial(rewritten.run, inputs)
    if not originals:
        with undisturbed_rng(), apart():
            entry.times_ms["refold"] = median_ms(ours, device)
        return
    log.info("timing the whole graph against the original")
    rivals, times, name, result = _raced(originals, ours, inputs, device)
    if add is not None and result.speedup < CLEARLY:
        add()
        rivals, times, name, result = _raced(originals, ours, inputs, device)
    elif add is not None:
        entry.notes.append(
            f"torch.compile was not timed: compiling the original would take about {rewritten.original_s:.0f} s, and "
            "the rewritten graph moves less than half of the bytes and takes less than half of the time of eager"
        )
    with undisturbed_rng(), apart():
        for other, run in rivals.items():
            slow = times[other] > SLOW_MS
            entry.times_ms[other] = (
                result.base_ms if other == name else times[other] if slow else median_ms(run, device)
            )
            # On the CPU memory is traced operation by operation, which takes a long loop many times its run time.
            if peaks or device.type != "cpu":
                entry.peak_bytes[other] = peak_bytes(run, device)
        entry.times_ms["refold"] = result.candidate_ms
        entry.peak_bytes["refold"] = peak_bytes(ours, device)
        entry.speedup, entry.speedup_at_least, entry.speedup_at_most = result.speedup, result.at_least, result.at_most
        for who, run in {**rivals, "refold": ours}.items():
            if found := profile.take(f"graph {entry.index}: {who}", run, device):
                entry.kernels[who] = found
    entry.busy, entry.provisional = result.busy, bool(result.busy) and not result.faster
    calls = unrolled_size(rewritten.graph), unrolled_size(gm)
    if result.open and (aside := _load_aside(entry, result, calls if name == "eager" else None)):
        entry.reason = f"because the machine was too busy to tell, and {aside}"
    elif not result.faster:
        entry.chosen = "eager" if name == "eager" else "inductor"
        entry.reason = (
            f"because the rewritten graph is not measurably faster than {name}: "
            f"{between(result.at_least, result.at_most)}, must exceed {1 + DELTA:.2f}x for certain"
        )


def _load_aside(entry: GraphReport, result: Race, calls: tuple[int, int] | None) -> str:
    """Say what speaks for a program that does not depend on what else the machine does; empty if nothing does.

    Args:
        entry: The report, with what the program and the original cost.
        result: A race that decided nothing.
        calls: How many calls the program and the original make, if the original runs call by call.
    """
    if result.fastest < 1:
        return ""
    if result.fastest > CLEARLY:
        return f"the fastest call of the original takes {result.fastest:.1f} times as long as its own"
    if clearly_less(*_costs(entry)):
        return f"it moves {entry.bytes_before / max(entry.bytes_after, 1):.0f} times fewer bytes"
    if calls is not None and calls_far_less(*calls):
        return f"it makes {calls[0]} calls, and eager {calls[1]}"
    return ""


def _raced(
    originals: dict[str, Compiled], ours: Callable[[], object], inputs: Sequence[Any], device: torch.device
) -> tuple[dict[str, Callable[[], object]], dict[str, float], str, Race]:
    """Race a program against the fastest of the originals; return all calls, their times, its name, and the race."""
    rivals = {name: _trial(run, inputs) for name, run in originals.items()}
    with undisturbed_rng(), apart():
        ours()
        times = first_times(rivals, device)
        name = min(times, key=times.__getitem__)
        return rivals, times, name, race(rivals[name], ours, device, budget_s=TIMING_BUDGET_S, patient=False)


def _costs(entry: GraphReport) -> tuple[Cost, Cost]:
    """Return what the rewritten graph and the original cost."""
    return Cost(entry.flops_after, entry.bytes_after), Cost(entry.flops_before, entry.bytes_before)


def _add_plain(
    originals: dict[str, Compiled],
    gm: GraphModule,
    inputs: Sequence[Any],
    options: Options,
    entry: GraphReport,
    compiled: dict[str, Compiled],
) -> None:
    """Add plain Inductor to what is raced against, if it can compile the graph, or has."""
    if compiled:
        originals |= compiled
        return
    log.info("compiling the original with Inductor, to time it, too")
    start = time.perf_counter()
    try:
        # With symbolic sizes the baseline must be compiled for them too, in the context that knows them.
        dynamic = any(isinstance(x, torch.SymInt) for x in inputs)
        run = (inductor if dynamic else standalone)(gm, inputs, options=options.inductor, notes=entry.notes)
        with undisturbed_rng(), apart():
            _trial(run, inputs)()
        originals["torch.compile"] = compiled["torch.compile"] = run
        entry.inductor_compile_s = time.perf_counter() - start
    except Exception as error:  # Inductor's failures have no common type
        entry.notes.append(f"torch.compile alone fails on this graph: {first_line(error)}")


def _device(inputs: Sequence[Any]) -> torch.device:
    devices = [x.device for x in inputs if isinstance(x, torch.Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _trial(run: Compiled, inputs: Sequence[Any]) -> Callable[[], object]:
    """Return a call on copies of the inputs, with backward where the outputs ask for it."""
    own = clone_inputs(inputs)
    return with_backward(lambda: run(*arguments(own, inputs)), own)
