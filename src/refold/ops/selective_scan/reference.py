"""The definition of the Mamba-1 scan: NumPy, float64, one token after the other."""

from __future__ import annotations

import math

import numpy as np
from numpy import ndarray

from refold.ops.ssd.reference import silu, step_size


def selective_scan(
    x: ndarray, dt: ndarray, A: ndarray, B: ndarray, C: ndarray, D: ndarray | None = None, z: ndarray | None = None,
    dt_bias: ndarray | None = None, decay: ndarray | None = None, initial_state: ndarray | None = None,
    cu_seqlens: ndarray | None = None, dt_softplus: bool = False, state_dtype: object = None,
) -> tuple[ndarray, ndarray]:  # fmt: skip
    """Return ``y`` and the last state of each sequence."""
    x, dt, A = (a.astype(np.float64) for a in (x, dt, A))
    batch, seqlen, channels = x.shape
    B, C = per_channel(B, channels), per_channel(C, channels)  # (b, t, d, n)
    dt = step_size(dt, dt_bias, dt_softplus, (-math.inf, math.inf))
    decay = np.ones_like(x) if decay is None else decay.astype(np.float64)
    ends = [seqlen] * batch if cu_seqlens is None else cu_seqlens[1:].tolist()
    starts = [0] * batch if cu_seqlens is None else cu_seqlens[:-1].tolist()

    y = np.zeros_like(x)
    states = np.zeros((len(starts), *A.shape))
    if initial_state is not None:
        states[:] = initial_state
    for k, (start, end) in enumerate(zip(starts, ends, strict=True)):
        row, h = (k if cu_seqlens is None else 0), states[k]
        for t in range(start, end):
            d = dt[row, t][:, None]  # (d, 1)
            h[:] = decay[row, t][:, None] * np.exp(d * A) * h + d * x[row, t][:, None] * B[row, t]
            y[row, t] = np.sum(h * C[row, t], axis=-1)
    if D is not None:
        y += D.astype(np.float64) * x
    return y if z is None else y * silu(z.astype(np.float64)), states


def selective_scan_step(x, dt, A, B, C, state, D=None, z=None, dt_bias=None, decay=None, dt_softplus=False):
    """Return ``y`` and the state after one token, or a few if the inputs have a time axis."""
    one = x.ndim == 2
    x, dt, B, C, z, decay = (a[:, None] if one and a is not None else a for a in (x, dt, B, C, z, decay))
    y, state = selective_scan(x, dt, A, B, C, D, z, dt_bias, decay, state, dt_softplus=dt_softplus)
    return y[:, 0] if one else y, state


def per_channel(projection: ndarray, channels: int) -> ndarray:
    """Return a projection (b, t, n) or (b, t, g, n) as (b, t, d, n)."""
    grouped = projection[:, :, None] if projection.ndim == 3 else projection
    return np.repeat(grouped.astype(np.float64), channels // grouped.shape[2], axis=2)
