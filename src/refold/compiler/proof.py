"""Prove one rewrite, then race it: the bridge from compiler regions to `refold.verify`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from ..verify import Evidence, Race, check, race
from ..verify.memory import available_bytes
from ..verify.timing import once_ms
from .capture import standalone
from .cost import concrete, graph_cost
from .evaluate import evaluate, evaluate_float64
from .rewrite import Rewrite

# A region may take this many seconds of pair timing before the race is called.
RACE_BUDGET_S = 5.0


@dataclass(frozen=True)
class Settings:
    """How careful to be.

    Attributes:
        verify: ``quick`` proves each rewrite against float64; ``off`` trusts the algebra.
        accept: ``faster`` keeps only what is measured to be faster; ``always`` keeps all that is right.
        strict: Raise refold's own errors instead of falling back with a warning.
        options: Options passed on to Inductor.
    """

    verify: str = "quick"
    accept: str = "faster"
    strict: bool = False
    options: Mapping[str, Any] | None = None


@dataclass
class Verdict:
    """What was found out about one rewrite; ``reason`` is empty if it stands."""

    reason: str = ""
    evidence: Evidence | None = None
    race: Race | None = None
    original_by: str = ""


def judge(rewrite: Rewrite, actual: Sequence[Any] | None, settings: Settings) -> Verdict:
    """Decide whether a rewrite is right and faster.

    Args:
        rewrite: The rewrite.
        actual: Its inputs as the user's data makes them; None if they could not be had.
        settings: What to require.
    """
    verdict = Verdict()
    like = list(actual) if actual is not None else _examples(rewrite.original)
    if like is None:
        verdict.reason = "its inputs could not be made up: they are not all floating-point tensors"
        return verdict
    device = next(x.device for x in like if isinstance(x, torch.Tensor))
    if settings.verify == "quick":
        start = time.perf_counter()
        verdict.evidence = check(
            lambda *xs: evaluate(rewrite.original, xs),
            lambda *xs: evaluate(rewrite.candidate, xs),
            lambda *xs: evaluate_float64(rewrite.original, xs),
            actual,
            like,
            terms=rewrite.terms,
            multilinear=rewrite.multilinear,
        )
        verdict.evidence.seconds = time.perf_counter() - start
        if not verdict.evidence.passed:
            verdict.reason = f"not equal to the original: {verdict.evidence.reason}"
            return verdict
    if settings.accept == "faster" and not rewrite.free:
        verdict.race, verdict.original_by = _race(rewrite, like, device, settings)
        if not verdict.race.faster:
            verdict.reason = (
                f"not faster: {verdict.race.speedup:.2f}x of {verdict.original_by}, "
                f"at least {verdict.race.at_least:.2f}x, must exceed 1.02x"
            )
    return verdict


def _examples(gm: GraphModule) -> list[Any] | None:
    """Make up region inputs from their types; None if something other than a float tensor is needed."""
    made: list[Any] = []
    for node in gm.graph.find_nodes(op="placeholder"):
        val = node.meta.get("val")
        if isinstance(val, (int, torch.SymInt)):
            made.append(concrete(val))
        elif isinstance(val, torch.Tensor) and val.is_floating_point():
            shape = [concrete(size) for size in val.shape]
            strides = [concrete(stride) for stride in val.stride()]
            made.append(torch.empty_strided(shape, strides, dtype=val.dtype, device=val.device).normal_())
        else:
            return None
    return made


def _race(rewrite: Rewrite, inputs: Sequence[Any], device: torch.device, settings: Settings) -> tuple[Race, str]:
    """Race the region against the faster of its eager and compiled original."""
    options = dict(settings.options or {})
    originals: dict[str, Callable[[], object]] = {}
    with torch.no_grad():
        if fits(rewrite.original, device):
            originals["eager"] = lambda: rewrite.original(*inputs)
        compiled = compile_or_none(rewrite.original, inputs, options)
        if compiled is not None:
            originals["torch.compile"] = lambda: compiled(*inputs)
        fast = compile_or_none(rewrite.candidate, inputs, options)
        run = (lambda: fast(*inputs)) if fast is not None else (lambda: rewrite.candidate(*inputs))
        run()
        if not originals:  # cannot be run at all the way it was: anything that runs is faster
            ms = once_ms(run, device)
            return Race(float("inf"), ms, float("inf"), float("inf"), 0, True), "nothing (does not fit in memory)"
        name, base = fastest(originals, device)
        return race(base, run, device, budget_s=RACE_BUDGET_S), name


def compile_or_none(
    gm: GraphModule, inputs: Sequence[Any], options: dict[str, Any]
) -> Callable[..., Any] | None:
    """Compile a graph apart from the compile under way; None if Inductor cannot."""
    try:
        compiled = standalone(gm, inputs, options)
        compiled(*inputs)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # Inductor's failures have no common type
        return None
    return compiled


def fits(gm: GraphModule, device: torch.device) -> bool:
    """Tell whether a graph can be run node by node: its largest value must fit twice."""
    return 2 * graph_cost(gm.graph.nodes).largest < available_bytes(device)


def fastest(runs: dict[str, Callable[[], object]], device: torch.device) -> tuple[str, Callable[[], object]]:
    """Return the fastest of several callables by the better of two calls after a warm-up."""
    times = {}
    for name, run in runs.items():
        first = once_ms(run, device)
        # A slow first call decides by itself: nobody's second call is ten times faster.
        times[name] = min(once_ms(run, device) for _ in range(2)) if first < 2e3 else first
    best = min(times, key=times.__getitem__)
    return best, runs[best]
