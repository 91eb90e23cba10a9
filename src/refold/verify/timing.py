"""Timing in turns, with a decision rule for noisy machines.

For each pair the order of the two callables is drawn at random, and ``d = log(t_base / t_cand)``. The candidate is
accepted if the lower confidence bound of the *median* of d exceeds ``log(1 + delta)``. The bound comes from a sign
test, which assumes no distribution and which outliers do not move. The rule is applied after 9, 30 and 60 pairs, each
time with an equal share of the error probability alpha. The same bound from above ends a hopeless comparison early.

If the candidate takes a fraction of the baseline's time, nine runs of a slow baseline are more than needed. Then three
runs of the baseline come at random places among twelve runs of the candidate. If both are equally fast, the three are
all slower than the twelve with probability 1 / 455 (the rank-sum test). This test comes first. The interval of the
ratio then spans all ratios between the two sets of runs.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .contention import Usage, contention, usage

LOOKS = (9, 30, 60)
FEW, MANY = 3, 12
# Then the many runs of the candidate take less time than the few of the baseline.
LOPSIDED = MANY / FEW
ALPHA = 0.01
SHARE = ALPHA / (1 + len(LOOKS))  # of a look
DELTA = 0.02
# A busy machine delays calls and never speeds one up, so a short call is sampled as the best of a few.
BEST_OF = 3
SHORT_MS = 100.0


@dataclass(frozen=True)
class Timing:
    """The outcome of timing two callables against each other.

    Attributes:
        base_ms: Median time of the baseline, milliseconds.
        candidate_ms: Median time of the candidate, milliseconds.
        speedup: Median of the paired ratios.
        at_least: Lower confidence bound of that median.
        at_most: Upper confidence bound of that median.
        pairs: Number of pairs run; in the short test, runs of the baseline.
        faster: Whether ``at_least`` exceeds 1.02.
        busy: How the machine was busy with something else meanwhile; empty if it was not.
        fastest: The fastest call of the baseline over the fastest of the candidate. Waiting only makes calls longer, so
            this depends least on what else the machine does. nan if it was not measured.
    """

    base_ms: float
    candidate_ms: float
    speedup: float
    at_least: float
    at_most: float
    pairs: int
    faster: bool
    busy: str = ""
    fastest: float = math.nan

    @property
    def slower(self) -> bool:
        """Whether the candidate is certainly slower: the whole interval is below 1."""
        return self.at_most < 1

    @property
    def open(self) -> bool:
        """Whether the times decide nothing because the machine was busy."""
        return bool(self.busy) and not self.faster and not self.slower


def once_ms(run: Callable[[], object], device: torch.device) -> float:
    """Time one call from start to finish of its device work, in milliseconds."""
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3


def median_ms(run: Callable[[], object], device: torch.device, budget_s: float = 1.0, most: int = 20) -> float:
    """Return the median of up to ``most`` calls within a time budget, after one warm-up."""
    first = once_ms(run, device)
    times: list[float] = []
    deadline = time.perf_counter() + budget_s
    while len(times) < most and (not times or time.perf_counter() < deadline):
        times.append(once_ms(run, device))
        if first > budget_s * 1e3:
            break
    return statistics.median(times)


def sample_ms(run: Callable[[], object], device: torch.device) -> float:
    """Time one call, in milliseconds; a short one as the best of a few."""
    first = once_ms(run, device)
    if first > SHORT_MS:
        return first
    return min(first, *(once_ms(run, device) for _ in range(BEST_OF - 1)))


def synchronize(device: torch.device) -> None:
    """Wait for a device's queued work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def race(
    base: Callable[[], object], candidate: Callable[[], object], device: torch.device, *, budget_s: float = 10.0,
    seed: int = 0, tried: int = 1, looks: Sequence[int] = LOOKS, patient: bool = True,
) -> Timing:  # fmt: skip
    """Time a candidate against a baseline, interleaved in random order.

    Args:
        base: The callable to beat.
        candidate: The callable to judge. A first call of each, which is not judged, warms them up.
        device: Where their work runs.
        budget_s: After this many seconds, timing ends. A candidate that is undecided then is not accepted.
        seed: Seeds the order within pairs.
        tried: Candidates tried against the same baseline; they share the chance of error.
        looks: After how many pairs the rule is applied; fewer looks leave more undecided.
        patient: Whether all looks are taken on a busy machine, too, where calls take long and more pairs seldom decide.

    Returns:
        The medians and the verdict.
    """
    start = usage()
    order = random.Random(seed)
    # The rank-sum test of a few runs has a chance of error that cannot be made smaller.
    if once_ms(base, device) > LOPSIDED * once_ms(candidate, device) and tried == 1:
        outcome = _few_among_many(base, candidate, device, order, start)
        if outcome.faster:
            return outcome
    base_times: list[float] = []
    candidate_times: list[float] = []
    deadline = time.perf_counter() + budget_s
    logs: list[float] = []
    lower, upper = -math.inf, math.inf
    for look in looks:
        while len(base_times) < look and (len(base_times) < looks[0] // 3 or time.perf_counter() < deadline):
            pair = [(base, base_times), (candidate, candidate_times)]
            if order.random() < 0.5:
                pair.reverse()
            for run, times in pair:
                times.append(sample_ms(run, device))
        logs = sorted(math.log(b / c) for b, c in zip(base_times, candidate_times, strict=True))
        lower, upper = median_bounds(logs, SHARE / tried)
        if lower > math.log1p(DELTA) or upper < math.log1p(DELTA) or len(logs) < look:
            break
        if not patient and contention(usage() - start, [base_times, candidate_times]):
            break
    return Timing(
        statistics.median(base_times),
        statistics.median(candidate_times),
        math.exp(statistics.median(logs)),
        math.exp(lower),
        math.exp(upper),
        len(logs),
        lower > math.log1p(DELTA),
        contention(usage() - start, [base_times, candidate_times]),
        min(base_times) / min(candidate_times),
    )


def _few_among_many(
    base: Callable[[], object],
    candidate: Callable[[], object],
    device: torch.device,
    order: random.Random,
    start: Usage,
) -> Timing:
    """Time a few runs of the baseline at random places among many of the candidate."""
    turns = [True] * FEW + [False] * MANY
    order.shuffle(turns)
    times = [(turn, once_ms(base if turn else candidate, device)) for turn in turns]
    slow, fast = (sorted(ms for turn, ms in times if turn is kind) for kind in (True, False))
    middle = statistics.median(slow), statistics.median(fast)
    at_least = slow[0] / fast[-1]
    at_most, busy = slow[-1] / fast[0], contention(usage() - start, [fast])
    return Timing(*middle, middle[0] / middle[1], at_least, at_most, FEW, at_least > 1 + DELTA, busy, slow[0] / fast[0])


def median_bounds(ordered: list[float], alpha: float) -> tuple[float, float]:
    """Return one-sided confidence bounds of the median at level ``1 - alpha`` from sorted samples."""
    n = len(ordered)
    tail, k = 0.0, -1
    while k + 1 < n and (tail := tail + math.comb(n, k + 1) * 0.5**n) <= alpha:
        k += 1
    return (ordered[k], ordered[n - 1 - k]) if k >= 0 else (-math.inf, math.inf)
