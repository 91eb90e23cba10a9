"""The last word: the rewritten graph against eager and plain Inductor, on copies of the user's inputs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from ...report import GraphReport
from ...verify import median_ms, race
from ...verify.memory import available_bytes, peak_bytes
from ..dynamo.to_scan import unrolled_size
from ..inductor import Compiled, apart, clone_inputs, inductor, standalone
from .region import INDUCTOR_NODES, Settings, first_times, undisturbed_rng

log = logging.getLogger("refold")

# A race may take this long.
RACE_BUDGET_S = 20.0
# What takes longer than this, and is not the fastest, is timed no more often than it takes to know that.
SLOW_MS = 200.0


def hold(
    compiled: Compiled, gm: GraphModule, inputs: Sequence[Any], settings: Settings, entry: GraphReport
) -> Compiled:
    """Race a rewritten graph against eager and plain Inductor, and record the outcome.

    Args:
        compiled: The rewritten graph.
        gm: The graph as it was.
        inputs: The values it was captured with; copies of them are used.
        settings: Carries the options for Inductor.
        entry: The report to write into.

    Returns:
        The fastest of the three.
    """
    device = _device(inputs)
    options = dict(settings.options or {})
    contenders: dict[str, Callable[[], object]] = {}
    if 2 * max(row.largest_before for row in entry.rewrites) < available_bytes(device):
        contenders["eager"] = _trial(gm, inputs)
    else:
        entry.notes.append("eager was not timed: it does not fit in memory")
    size = unrolled_size(gm)
    unrolled = size > INDUCTOR_NODES and any(row.name == "roll up loop" for row in entry.applied)
    if "eager" in contenders and unrolled:
        entry.notes.append(f"torch.compile was not timed: an unrolled loop of {size} nodes takes it minutes")
    else:
        _add_plain(contenders, gm, inputs, options, entry)
    ours = _trial(compiled, inputs)
    with undisturbed_rng(), apart():
        ours()
        if not contenders:
            entry.times_ms["refold"] = median_ms(ours, device)
            return compiled
        log.info("racing the whole graph")
        times = first_times(contenders, device)
        name = min(times, key=times.__getitem__)
        result = race(contenders[name], ours, device, budget_s=RACE_BUDGET_S)
        for other, run in contenders.items():
            slow = times[other] > SLOW_MS
            entry.times_ms[other] = (
                result.base_ms if other == name else times[other] if slow else median_ms(run, device)
            )
            # On the CPU memory is traced operation by operation, which takes a long loop many times its run time.
            if not unrolled or device.type != "cpu":
                entry.peak_bytes[other] = peak_bytes(run, device)
        entry.times_ms["refold"] = result.candidate_ms
        entry.peak_bytes["refold"] = peak_bytes(ours, device)
        entry.speedup, entry.speedup_at_least = result.speedup, result.at_least
        if "eager" in contenders and entry.mode == "inference":
            entry.difference_from_eager = _difference(contenders["eager"](), ours())
    if result.faster:
        return compiled
    entry.chosen = "eager" if name == "eager" else "inductor"
    entry.reason = f"because the rewritten graph is not faster than {name} ({result.speedup:.2f}x)"
    for row in entry.applied:
        row.status, row.reason = "refused", "the whole graph is not faster with the rewrites"
    return gm if name == "eager" else inductor(gm, inputs, options=options)


def _add_plain(
    contenders: dict[str, Callable[[], object]],
    gm: GraphModule,
    inputs: Sequence[Any],
    options: dict[str, Any],
    entry: GraphReport,
) -> None:
    """Add plain Inductor to what is raced against, if it can compile the graph."""
    log.info("compiling the original with Inductor, to race against it")
    start = time.perf_counter()
    try:
        # With symbolic sizes the baseline must be compiled for them too, in the context that knows them.
        dynamic = any(isinstance(x, torch.SymInt) for x in inputs)
        plain = _trial((inductor if dynamic else standalone)(gm, inputs, options=options), inputs)
        with undisturbed_rng(), apart():
            plain()
        contenders["torch.compile"] = plain
        entry.inductor_compile_s = time.perf_counter() - start
    except Exception as error:  # Inductor's failures have no common type
        entry.notes.append(f"torch.compile alone fails on this graph: {first_line(error)}")


def first_line(error: BaseException) -> str:
    """Return an error's type and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _device(inputs: Sequence[Any]) -> torch.device:
    devices = [x.device for x in inputs if isinstance(x, torch.Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _trial(run: Compiled, inputs: Sequence[Any]) -> Callable[[], object]:
    """Return a call on copies of the inputs, with backward where the outputs ask for it."""
    own = clone_inputs(inputs)
    leaves = [x for x in own if isinstance(x, torch.Tensor) and x.requires_grad]

    def call() -> object:
        out = run(*own)
        outputs = [y for y in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(y, torch.Tensor)]
        if torch.is_grad_enabled() and leaves:
            roots = [y for y in outputs if y.requires_grad]
            if roots:
                torch.autograd.grad(roots, leaves, [torch.ones_like(y) for y in roots], allow_unused=True)
        return [y.detach() for y in outputs]

    return call


def _difference(expected: Any, got: Any) -> float:
    """Return the largest relative L2 difference over the floating-point outputs."""
    worst = 0.0
    for a, b in zip(expected, got, strict=True):
        if a.is_floating_point():
            a, b = a.double(), b.double()
            norm = float(torch.linalg.vector_norm(a)) or 1.0
            worst = max(worst, float(torch.linalg.vector_norm(b - a)) / norm)
    return worst
