"""Check one rewrite, then time it: the bridge from compiler regions to `refold.verify`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils.flop_counter import flop_registry

from ...report.text import between
from ...verify import Evidence, Function, KindResult, Timing, check, profile, race
from ...verify.memory import available_bytes
from ...verify.numerics import in_strides
from ...verify.timing import DELTA, LOOKS, once_ms
from ..compile_time import RIVAL_S, inductor_seconds
from ..inductor import duplicate, standalone
from ..ir.builder import same_strides
from ..ir.cost import calls_far_less, clearly_less, computing, concrete, graph_cost, node_cost
from ..ir.evaluate import evaluate, with_gradients
from ..ir.metadata import stale
from ..ir.rewrite import Rewrite
from ..options import Options
from ..refusals import refused

log = logging.getLogger("refold")

# A region may take this many seconds of pair timing before the race is called.
TIMING_BUDGET_S = 5.0
# Inductor takes seconds for a region of more operations than these.
FEW_OPERATIONS = 8


@dataclass
class Judgement:
    """What was found out about one rewrite; ``reason`` is empty if it stands.

    Attributes:
        reason: Why it does not stand.
        evidence: What the check found.
        race: Its times, if it was timed alone.
        original_by: What of the original was the fastest.
        postponed: Whether it could be timed alone, and the race of the whole graph comes first.
    """

    reason: str = ""
    evidence: Evidence | None = None
    race: Timing | None = None
    original_by: str = ""
    postponed: bool = False

    @property
    def hurried(self) -> bool:
        """Whether it was refused because of times that were taken on a busy machine."""
        return bool(self.reason) and self.race is not None and bool(self.race.busy)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Judgement:
        """Return the verdict that ``dataclasses.asdict`` wrote.

        Raises:
            KeyError or TypeError: The data is not that of a verdict.
        """
        evidence, timed = data["evidence"], data["race"]
        if evidence is not None:
            evidence = Evidence(**{**evidence, "kinds": [KindResult(**kind) for kind in evidence["kinds"]]})
        timed = None if timed is None else Timing(**timed)
        return cls(data["reason"], evidence, timed, data["original_by"], data["postponed"])


def validate_region(
    rewrite: Rewrite,
    actual: Sequence[Any] | None,
    options: Options,
    each: bool = False,
    evidence: Evidence | None = None,
) -> Judgement:
    """Decide whether a rewrite is right and faster.

    Args:
        rewrite: The rewrite.
        actual: Its inputs as the user's data makes them; None if they could not be had.
        options: What to require.
        each: Whether it is timed alone even if Inductor takes seconds to compile it for that.
        evidence: What a check of it found before; None if it was not checked.
    """
    verdict = Judgement(evidence=evidence)
    actual = None if actual is None else [_as_traced(*pair) for pair in zip(_inputs(rewrite), actual, strict=True)]
    like = list(actual) if actual is not None else _examples(rewrite)
    if like is None:
        verdict.reason = refused(
            "inputs-unknown", "its inputs could not be made up: they are not all floating-point tensors"
        )
        return verdict
    results = rewrite.original.graph.output_node().all_input_nodes  # where a region of constants computes
    device = next(x.device for x in (*like, *(node.meta.get("val") for node in results)) if isinstance(x, torch.Tensor))
    with torch.autocast(device.type, enabled=False):  # the user's, which may be active, is in the graph already
        return _decided(verdict, rewrite, actual, like, device, options, each)


def _decided(
    verdict: Judgement, rewrite: Rewrite, actual: Sequence[Any] | None, like: list[Any], device: torch.device,
    options: Options, each: bool,
) -> Judgement:  # fmt: skip
    if (options.verify == "quick" or rewrite.guessed) and verdict.evidence is None:
        log.info("checking %s: %s", rewrite.site, rewrite.detail)
        start = time.perf_counter()
        if reason := _misdescribed(rewrite):
            verdict.reason = refused("metadata-wrong", reason)
            return verdict
        original, candidate, reference, narrowed = _programs(rewrite)
        verdict.evidence = check(
            original,
            candidate,
            reference,
            None if actual is None else _real(actual),
            _real(like),
            terms=rewrite.terms,
            multilinear=rewrite.multilinear,
            spread=rewrite.spread,
            narrowed=narrowed,
            differentiated=rewrite.differentiated,
            coupled=rewrite.coupled,
            rounds_more=rewrite.rounds_more,
        )
        verdict.evidence.seconds = time.perf_counter() - start
        if not verdict.evidence.passed:
            verdict.reason = refused("not-equal", f"not equal to the original: {verdict.evidence.reason}")
            return verdict
    _profile(rewrite, like, device)
    if options.accept == "faster" and rewrite.timed_alone:
        baseline = _baseline(rewrite, options)
        if (
            baseline is not None
            and device.type == "cpu"
            and clearly_less(rewrite.after, graph_cost(baseline.graph.nodes))
        ):
            # To compile the baseline for the CPU takes longest of all. The race of the whole graph decides.
            return verdict
        if baseline is None and not each:
            # The backward, and what Inductor makes of the surroundings, are in the race of the whole graph alone.
            verdict.postponed = any(rewrite.differentiated) or computing(rewrite.original.graph.nodes) > FEW_OPERATIONS
            if verdict.postponed:
                return verdict
        log.info("comparing the time of %s with the original", rewrite.site)
        # A tie refuses no rewrite of a small region, and few pairs say whether it is clearly slower.
        looks = LOOKS[:1] if baseline is None and not each else LOOKS
        verdict.race, verdict.original_by = _time(rewrite, baseline, like, device, options, looks)
        # A region alone is spared what Inductor's fusion recomputes in the whole graph, so the race
        # is generous to the original. What it cannot decide, the race of the whole graph will, unless
        # this rewrite stands in the way of others.
        slower = not verdict.race.faster if baseline is not None else verdict.race.at_most <= 1 + DELTA
        calls = len(rewrite.candidate.graph.nodes)
        fewer_calls = verdict.original_by == "eager" and calls_far_less(calls, rewrite.size)
        if verdict.race.open and (fewer_calls or clearly_less(rewrite.after, rewrite.before)):
            return verdict  # a busy machine does not decide
        if slower:
            verdict.reason = refused(
                "not-faster",
                f"not faster: {verdict.race.speedup:.2f}x of {verdict.original_by}, "
                f"{between(verdict.race.at_least, verdict.race.at_most)}, must exceed {1 + DELTA:.2f}x",
            )
    return verdict


def _profile(rewrite: Rewrite, inputs: Sequence[Any], device: torch.device) -> None:
    """Let a trace show the region before and after, both run node by node, if one is taken."""
    region = f"{rewrite.name} [{rewrite.site}]"
    with torch.no_grad():
        if fits(rewrite.original, device):
            profile.take(f"{region}: before", lambda: rewrite.original(*inputs), device)
        profile.take(f"{region}: after", lambda: rewrite.candidate(*inputs), device)


def _misdescribed(rewrite: Rewrite) -> str:
    """Say what about a candidate's metadata is wrong; empty if nothing is.

    Code is generated from it, while the numbers are compared on a run that does without.
    """
    old, new = (gm.graph.output_node().args[0] for gm in (rewrite.original, rewrite.candidate))
    if not (isinstance(old, Node) and isinstance(new, Node)):
        return ""  # a captured loop: AOTAutograd traces anew what replaces it
    if wrong := stale(rewrite.candidate.graph):
        return f"its metadata is wrong: {wrong}"
    old, new = old.meta["val"], new.meta["val"]
    same = old.shape == new.shape and old.dtype == new.dtype and same_strides(old, new)
    return "" if same else f"its result has strides {tuple(new.stride())}, the original's {tuple(old.stride())}"


def _programs(rewrite: Rewrite) -> tuple[Function, Function, Function, Function]:
    """Return the original, the candidate, the original in float64, and with float32 in place of float64.

    They take and return real numbers: a complex tensor has an axis for its parts, and each part is compared.
    """
    needed = rewrite.differentiated
    parts = [isinstance(x, torch.Tensor) and x.is_complex() for x in _inputs(rewrite)]

    def program(gm: GraphModule, dtype: torch.dtype | None = None) -> Function:
        def run(*given: Any) -> Any:
            xs = [torch.view_as_complex(x.contiguous()) if own else x for x, own in zip(given, parts, strict=True)]
            results = with_gradients(gm, xs, needed, dtype) if any(needed) else evaluate(gm, xs, dtype)
            return tuple(_real(results)) if isinstance(results, (tuple, list)) else _real([results])[0]

        return run

    original = rewrite.original
    return (
        program(original),
        program(rewrite.candidate),
        program(original, torch.float64),
        program(original, torch.float32),
    )


def _real(xs: Sequence[Any]) -> list[Any]:
    """Return complex tensors as real ones with an axis for the two parts."""
    return [torch.view_as_real(x.resolve_conj()) if isinstance(x, torch.Tensor) and x.is_complex() else x for x in xs]


def _inputs(rewrite: Rewrite) -> list[Any]:
    """Return the fake values of a region's inputs."""
    return [node.meta.get("val") for node in rewrite.original.graph.find_nodes(op="placeholder")]


def _as_traced(expected: Any, x: Any) -> Any:
    """Give a value the strides that the graph was traced with; the region's views rely on them."""
    if not isinstance(x, torch.Tensor):
        return x
    strides = [concrete(stride) for stride in expected.stride()]
    return x if list(x.stride()) == strides else in_strides(x, strides)


def _examples(rewrite: Rewrite) -> list[Any] | None:
    """Make up region inputs from their types; None if something other than a float tensor is needed."""
    made: list[Any] = []
    for val in _inputs(rewrite):
        if isinstance(val, (int, torch.SymInt)):
            made.append(concrete(val))
        elif isinstance(val, torch.Tensor) and (val.is_floating_point() or val.is_complex()):
            shape = [concrete(size) for size in val.shape]
            strides = [concrete(stride) for stride in val.stride()]
            made.append(in_strides(torch.empty(shape, dtype=val.dtype, device=val.device).normal_(), strides))
        else:
            return None
    return made


def _time(
    rewrite: Rewrite, baseline: GraphModule | None, inputs: Sequence[Any], device: torch.device, options: Options,
    looks: Sequence[int],
) -> tuple[Timing, str]:  # fmt: skip
    """Race the region against the fastest of its eager and compiled original, and what other rewrites make of it.

    What other rewrites make of it stands in for the compiled original: that one is in the race of the whole graph, and
    takes Inductor longest. Other rewrites are made after autograd, and have no backward. Without them, what is
    differentiated is timed with its backward.
    """
    inductor = dict(options.inductor)
    originals: dict[str, Callable[[], object]] = {}
    needed = rewrite.differentiated if baseline is None else ()
    if any(needed):
        inputs = [x.detach().requires_grad_() if needs else x for x, needs in zip(inputs, needed, strict=True)]
    with torch.set_grad_enabled(any(needed)):
        if fits(rewrite.original, device):
            originals["eager"] = with_backward(lambda: rewrite.original(*inputs), inputs)
        otherwise = None if baseline is None else compile_or_none(baseline, inputs, inductor)
        if otherwise is not None:
            originals["its other rewrites"] = lambda: otherwise(*inputs)
        elif inductor_seconds(rewrite.size) <= RIVAL_S and not (originals and _one_library_call(rewrite.original)):
            compiled = compile_or_none(rewrite.original, inputs, inductor)
            if compiled is not None:
                originals["torch.compile"] = with_backward(lambda: compiled(*inputs), inputs)
        fast = None if _one_library_call(rewrite.candidate) else compile_or_none(rewrite.candidate, inputs, inductor)
        ours = rewrite.candidate if fast is None else fast
        run = with_backward(lambda: ours(*inputs), inputs)
        run()
        if not originals:  # cannot be run at all the way it was: anything that runs is faster
            ms = once_ms(run, device)
            return Timing(inf, ms, inf, inf, inf, 0, True), "nothing (does not fit in memory)"
        name = min(times := first_times(originals, device), key=times.__getitem__)
        return race(originals[name], run, device, budget_s=TIMING_BUDGET_S, looks=looks, patient=False), name


def _one_library_call(gm: GraphModule) -> bool:
    """Tell whether a graph calls one matrix product or convolution and else only views: Inductor calls the same."""
    calls = [node for node in gm.graph.nodes if node.op.startswith("call") and node_cost(node).bytes]
    return len(calls) == 1 and (
        calls[0].target.namespace == "mkldnn" or calls[0].target.overloadpacket in flop_registry
    )


def _baseline(rewrite: Rewrite, options: Options) -> GraphModule | None:
    """Run the pipeline on the region without this rewrite; None if it changes nothing."""
    if inductor_seconds(len(rewrite.original.graph.nodes)) > RIVAL_S:
        return None
    twin = duplicate(rewrite.original)
    if len(twin.graph.output_node().all_input_nodes) != 1:
        return None
    (root,) = twin.graph.output_node().all_input_nodes
    _, colon, rule = rewrite.site.partition(":")
    site = f"{root.name}:{rule}" if colon else root.name
    return twin if options.rewrite(twin.graph, lambda other: other != site) else None


def compile_or_none(gm: GraphModule, inputs: Sequence[Any], options: dict[str, Any]) -> Callable[..., Any] | None:
    """Compile a graph apart from the compile under way; None if Inductor cannot."""
    try:
        compiled = standalone(gm, inputs, options=options)
        compiled(*inputs)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # Inductor's failures have no common type
        return None
    return compiled


def fits(gm: GraphModule, device: torch.device) -> bool:
    """Tell whether a graph can be run node by node: its largest value must fit twice."""
    return 2 * graph_cost(gm.graph.nodes).largest < available_bytes(device)


def first_times(runs: dict[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Return the time of each of several callables in milliseconds, taken once where that says who is fastest.

    One alone is the fastest, and is not timed: its time is 0.
    """
    if len(runs) == 1:
        return dict.fromkeys(runs, 0.0)
    times = {name: once_ms(run, device) for name, run in runs.items()}
    best = min(times.values())
    for name, run in runs.items():
        # A slow first call decides by itself: few second calls are four times faster.
        if times[name] < 4 * best:
            times[name] = min(once_ms(run, device) for _ in range(2))
    return times


def undisturbed_rng() -> AbstractContextManager[None]:
    """Keep trial runs from advancing the user's random state."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    return torch.random.fork_rng(devices=devices)


def with_backward(run: Callable[[], Any], inputs: Sequence[Any]) -> Callable[[], object]:
    """Return a call of a program, with its backward where gradients of the inputs are asked for."""
    leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]

    def call() -> object:
        out = run()
        outputs = [y for y in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(y, torch.Tensor)]
        if torch.is_grad_enabled() and leaves:
            roots = [y for y in outputs if y.requires_grad]
            if roots:
                torch.autograd.grad(roots, leaves, [torch.ones_like(y) for y in roots], allow_unused=True)
        return [y.detach() for y in outputs]

    return call
