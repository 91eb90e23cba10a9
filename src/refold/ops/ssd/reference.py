"""The definition of the Mamba-2 scan: NumPy, float64, one token after the other."""

from __future__ import annotations

import math

import numpy as np
from numpy import ndarray


def ssd(
    x: ndarray, dt: ndarray, A: ndarray, B: ndarray, C: ndarray, D: ndarray | None = None, z: ndarray | None = None,
    dt_bias: ndarray | None = None, initial_state: ndarray | None = None, cu_seqlens: ndarray | None = None,
    dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, math.inf),
    chunk_size: int | None = None, state_dtype: object = None,
) -> tuple[ndarray, ndarray]:  # fmt: skip
    """Return ``y`` and the last state of each sequence; the chunk size changes nothing."""
    x, dt, A, B, C = (a.astype(np.float64) for a in (x, dt, A, B, C))
    (batch, seqlen, nheads, headdim), repeat = x.shape, x.shape[2] // B.shape[2]
    B, C = np.repeat(B, repeat, axis=2), np.repeat(C, repeat, axis=2)  # (b, t, h, n)
    dt = step_size(dt, dt_bias, dt_softplus, dt_limit)
    ends = [seqlen] * batch if cu_seqlens is None else cu_seqlens[1:].tolist()
    starts = [0] * batch if cu_seqlens is None else cu_seqlens[:-1].tolist()

    y = np.zeros_like(x)
    states = np.zeros((len(starts), nheads, headdim, B.shape[-1]))
    if initial_state is not None:
        states[:] = initial_state
    for k, (start, end) in enumerate(zip(starts, ends, strict=True)):
        row, h = (k if cu_seqlens is None else 0), states[k]
        for t in range(start, end):
            d = dt[row, t]  # (h,)
            write = (d[:, None] * x[row, t])[:, :, None] * B[row, t][:, None, :]
            h[:] = np.exp(d * A)[:, None, None] * h + write
            y[row, t] = np.einsum("hpn,hn->hp", h, C[row, t])
    if D is not None:
        y += (D if D.ndim == 2 else D[:, None]).astype(np.float64) * x
    return y if z is None else y * silu(z.astype(np.float64)), states


def ssd_step(x, dt, A, B, C, state, D=None, z=None, dt_bias=None, dt_softplus=False, dt_limit=(0.0, math.inf)):
    """Return ``y`` and the state after one token, or a few if the inputs have a time axis."""
    one = x.ndim == 3
    x, dt, B, C, z = (a[:, None] if one and a is not None else a for a in (x, dt, B, C, z))
    y, state = ssd(x, dt, A, B, C, D, z, dt_bias, state, dt_softplus=dt_softplus, dt_limit=dt_limit)
    return y[:, 0] if one else y, state


def step_size(dt: ndarray, bias: ndarray | None, softplus: bool, limit: tuple[float, float]) -> ndarray:
    """Return the step that the recurrence takes: bias, softplus (linear above 20), clip."""
    dt = dt if bias is None else dt + bias.astype(np.float64)
    return np.clip(np.where(dt > 20, dt, np.log1p(np.exp(np.minimum(dt, 20)))) if softplus else dt, *limit)


def silu(v: ndarray) -> ndarray:
    """Return v times its logistic."""
    return v * (0.5 + 0.5 * np.tanh(0.5 * v))
