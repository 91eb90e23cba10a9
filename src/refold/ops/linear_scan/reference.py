"""The definition of the elementwise linear recurrence."""

from __future__ import annotations

from refold.ops.definition import Array, library, walk, wide


def linear_scan(
    a: Array, x: Array, initial_state: Array | None = None, cu_seqlens: Array | None = None,
    reset: Array | None = None, reverse: bool = False,
) -> tuple[Array, Array]:  # fmt: skip
    """Return every ``h`` and the last one of each sequence (the first in time if ``reverse``)."""
    a, x, initial_state = wide(a, x, initial_state)

    def step(row: int, t: int, h: Array) -> tuple[Array, Array]:
        factor = a[row, t]
        if reset is not None:  # before the product, so that neither has a gradient there
            factor, h = (library(x).where(reset[row, t], 0.0, v) for v in (factor, h))
        h = factor * h + x[row, t]
        return h, h

    return walk(x, cu_seqlens, initial_state, x.shape[2:], step, reverse)
