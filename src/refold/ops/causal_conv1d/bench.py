"""Calls of `causal_conv1d` that are measured on a GPU, in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator

from refold.ops.timed import Timed, normal


def forward() -> Iterator[Timed]:
    """Time causal_conv1d, gated_rmsnorm, linear_scan, and the one-token steps."""
    yield from (_case(1, 8192), _case(8, 4096))
    x, state = normal(64, 5376, dtype="bfloat16"), normal(64, 5376, 3, dtype="bfloat16")
    arrays = {"x": x, "weight": normal(5376, 4), "state": state}
    yield Timed("causal_conv1d_step_", "64x5376", arrays | {"activation": "silu"})


def backward() -> Iterator[Timed]:
    """Time gradients of causal_conv1d, gated_rmsnorm and linear_scan."""
    yield _case(8, 4096)


def _case(b: int, t: int) -> Timed:
    arrays = {"x": normal(b, t, 5376, dtype="bfloat16"), "weight": normal(5376, 4), "bias": normal(5376)}
    return Timed("causal_conv1d", f"{b}x{t}x5376", arrays | {"activation": "silu"})


SUITES = {"pointwise": forward, "pointwise-backward": backward}
