"""The definition of the elementwise linear recurrence: NumPy, float64, one token after the other."""

from __future__ import annotations

import numpy as np
from numpy import ndarray


def linear_scan(
    a: ndarray, x: ndarray, initial_state: ndarray | None = None, cu_seqlens: ndarray | None = None,
    reset: ndarray | None = None, reverse: bool = False,
) -> tuple[ndarray, ndarray]:  # fmt: skip
    """Return every ``h`` and the last one of each sequence (the first in time if ``reverse``)."""
    a, x = a.astype(np.float64), x.astype(np.float64)
    batch, seqlen = x.shape[:2]
    ends = [seqlen] * batch if cu_seqlens is None else cu_seqlens[1:].tolist()
    starts = [0] * batch if cu_seqlens is None else cu_seqlens[:-1].tolist()

    h = np.zeros_like(x)
    states = np.zeros((len(starts), *x.shape[2:]))
    if initial_state is not None:
        states[:] = initial_state
    for k, (start, end) in enumerate(zip(starts, ends, strict=True)):
        row = k if cu_seqlens is None else 0
        for t in reversed(range(start, end)) if reverse else range(start, end):
            kept = a[row, t] * states[k]
            states[k] = (kept if reset is None else np.where(reset[row, t], 0, kept)) + x[row, t]
            h[row, t] = states[k]
    return h, states
