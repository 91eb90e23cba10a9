"""A contest: programs that must give the same are compared with float64, and those that are right are timed in turns.

What fails or is wrong is named under ``not_run`` with the reason, and is not timed. If it is one of ours, the row is
refused. Eager is the measure of what a dtype gives, so it is timed whatever its error.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import first_line
from .rows import Row
from .turns import Turn, take_turns

# Relative L2 error of a result or gradient. A naive layer in bfloat16 is itself that far off, or farther.
BOUND = {"bfloat16": 5e-2, "float32": 1e-4}
# The first turns of a program do not count.
WARM = 2
# A program that takes longer is called a few times only.
SLOW_MS = 200.0
# One that takes less is called for so long before its turn: a slow one leaves the host's caches full of other code.
FAST_MS = 10.0
# The programs that may refuse a row begin with these.
OURS = ("refold", "accelerated")


def relative(got: Tensor, exact: Tensor) -> float:
    """Relative L2 distance of a result from an exact one."""
    return float((got.double() - exact).norm() / exact.norm())


def _several(results: Any) -> Sequence[Tensor]:
    return (results,) if isinstance(results, Tensor) else results


def times_ms(runs: Mapping[str, Turn], rounds: int, device: torch.device, calls: int = 1) -> dict[str, list[float]]:
    """Time programs that take turns: the sorted times of a call, in milliseconds; slow ones get fewer turns.

    On a GPU, a turn is ``calls`` calls in a row, and the host does not wait between them. It waits before the first
    call, and the L2 cache is overwritten then.
    """
    flush = None
    if device.type == "cuda":
        # What lies in a large block that is free would split it, and the next program that needs all of it fails.
        torch.cuda.empty_cache()
        flush = torch.empty(1 << 28, dtype=torch.float32, device=device)

    def sample(run: Turn, before: Sequence[float]) -> float:
        first = before[WARM] if len(before) > WARM else math.nan
        warm = time.perf_counter() + (FAST_MS / 1e3 if first < FAST_MS else 0.0)
        while time.perf_counter() < warm:
            run()
        if flush is None:
            start = time.perf_counter()
            run()
            return (time.perf_counter() - start) * 1e3
        flush.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        many = 1 if first > SLOW_MS else calls
        begin.record()
        for _ in range(many):
            run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / many

    found = take_turns(runs, WARM + rounds, sample, lambda times: len(times) > 4 and times[WARM] > SLOW_MS)
    return {name: sorted(times[WARM:]) for name, times in found.items()}


def contest(
    programs: Mapping[str, Turn], exact: Callable[[], Tensor | Sequence[Tensor]] | None, bound: float | None,
    rounds: int, device: torch.device, *, calls: int = 1, medians: str = "times_ms",
    compared: Callable[[Tensor], Tensor] = lambda result: result,
) -> tuple[Row, dict[str, Turn]]:  # fmt: skip
    """Compare programs with float64, and time those that are right.

    Args:
        programs: By name; each gives a result, or several.
        exact: Gives the same in float64; None: nothing is compared.
        bound: The largest relative error of a program that is timed; None: all are.
        rounds: How often each program takes its turn.
        device: Where they run.
        calls: Those of a turn on a GPU.
        medians: What the row calls the times.
        compared: The part of a result that ``exact`` gives.

    Returns:
        The row: first calls, errors, reasons, medians, percentiles, best times; and the programs that were timed.
    """
    expected = None if exact is None else exact()
    row: Row = {"first_call_s": {}, "errors": {}, "not_run": {}}
    runs: dict[str, Turn] = {}
    for name, program in programs.items():
        start, reason = time.perf_counter(), ""
        try:
            found = program()
            row["first_call_s"][name] = time.perf_counter() - start
            if expected is not None:
                pairs = zip(_several(found), _several(expected), strict=True)
                error = max((relative(compared(a), b) for a, b in pairs), key=lambda one: (math.isnan(one), one))
                row["errors"][name] = error
                if bound is not None and name != "eager" and not error <= bound:
                    reason = f"an error above {bound}"
            del found
        except Exception as failure:  # whatever a program raises; the others are measured
            reason = first_line(failure, 200)
        if not reason:
            runs[name] = program
            continue
        row["not_run"][name] = reason
        if name.startswith(OURS):
            row["refused"] = f"{name}: {reason}"
    del expected
    times = times_ms(runs, rounds, device, calls)
    row |= {
        medians: {name: statistics.median(found) for name, found in times.items()},
        "best_ms": {name: found[0] for name, found in times.items()},
        "p20_ms": {name: found[len(found) // 5] for name, found in times.items()},
        "p80_ms": {name: found[len(found) * 4 // 5] for name, found in times.items()},
    }
    return row, runs
