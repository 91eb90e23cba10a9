"""Calls of `linear_scan` that are measured on a GPU, in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator

from refold.ops.timed import Timed, normal, uniform


def cases() -> Iterator[Timed]:
    """Time a scan of 2048 tokens."""
    x = normal(1, 2048, 5120, dtype="bfloat16")
    yield Timed("linear_scan", "1x2048x5120", {"a": uniform(1, 2048, 5120).to(x.dtype), "x": x})


SUITES = {"pointwise": cases, "pointwise-backward": cases}
