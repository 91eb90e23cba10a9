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

Turn = Callable[[], Any]
# Relative L2 error of a result or gradient. A naive layer in bfloat16 is itself that far off, or farther.
BOUND = {"bfloat16": 5e-2, "float32": 1e-4}
# A program that takes longer is called a few times only.
SLOW_MS = 200.0
FAST_MS = 10.0
# The programs that may refuse a row begin with these.
OURS = ("refold", "accelerated")


def relative(got: Tensor, exact: Tensor) -> float:
    """Relative L2 distance of a result from an exact one."""
    return float((got.double() - exact).norm() / exact.norm())


def _several(results: Any) -> Sequence[Tensor]:
    return (results,) if isinstance(results, Tensor) else results


def take_turns(runs: Mapping[str, Turn], rounds: int, device: torch.device, calls: int = 1) -> dict[str, list[float]]:
    """Time programs that take turns: the sorted times of a call, in milliseconds; slow ones get fewer turns.

    A fast program is called once before its turn: a slow one leaves the host's caches full of other code. On a GPU, a
    turn is ``calls`` calls in a row, and the host does not wait between them. It waits before the first call, and the
    L2 cache is overwritten then.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    flush = None
    if device.type == "cuda":
        # What lies in a large block that is free would split it, and the next program that needs all of it fails.
        torch.cuda.empty_cache()
        flush = torch.empty(1 << 28, dtype=torch.float32, device=device)
    for i in range(rounds + 2):
        for name, run in runs.items():
            if i > 4 and times[name][0] > SLOW_MS:
                continue
            if times[name] and times[name][0] < FAST_MS:
                run()
            if flush is None:
                start = time.perf_counter()
                run()
                ms = (time.perf_counter() - start) * 1e3
            else:
                flush.zero_()
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                many = 1 if times[name] and times[name][0] > SLOW_MS else calls
                begin.record()
                for _ in range(many):
                    run()
                end.record()
                end.synchronize()
                ms = begin.elapsed_time(end) / many
            times[name] += [ms] if i >= 2 else []
    return {name: sorted(found) for name, found in times.items()}


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
    times = take_turns(runs, rounds, device, calls)
    row |= {
        medians: {name: statistics.median(found) for name, found in times.items()},
        "best_ms": {name: found[0] for name, found in times.items()},
        "p20_ms": {name: found[len(found) // 5] for name, found in times.items()},
        "p80_ms": {name: found[len(found) * 4 // 5] for name, found in times.items()},
    }
    return row, runs
