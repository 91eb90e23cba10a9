"""Calls of `gated_rmsnorm` that are measured on a GPU, in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator

from refold.ops.timed import Timed, normal


def forward() -> Iterator[Timed]:
    """Time a short and a long batch."""
    yield from (_case(1, 8192), _case(8, 4096))


def backward() -> Iterator[Timed]:
    """Time gradients of the long one."""
    yield _case(8, 4096)


def _case(b: int, t: int) -> Timed:
    arrays = {name: normal(b * t, 5120, dtype="bfloat16") for name in ("x", "z")}
    return Timed("gated_rmsnorm", f"{b}x{t}x5120", arrays | {"weight": normal(5120), "eps": 1e-5})


SUITES = {"pointwise": forward, "pointwise-backward": backward}
