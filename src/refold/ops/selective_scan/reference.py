"""The definition of the Mamba-1 scan."""

from __future__ import annotations

import math

from refold.ops.definition import Array, finish, library, one_token, per_head, step_size, walk, wide


def selective_scan(
    x: Array, dt: Array, A: Array, B: Array, C: Array, D: Array | None = None, z: Array | None = None,
    dt_bias: Array | None = None, decay: Array | None = None, initial_state: Array | None = None,
    cu_seqlens: Array | None = None, dt_softplus: bool = False, state_dtype: object = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Return ``y`` and the last state of each sequence."""
    x, dt, A, B, C, D, z, dt_bias, decay, initial = wide(x, dt, A, B, C, D, z, dt_bias, decay, initial_state)
    of = library(x)
    B, C = (per_head(a[:, :, None] if a.ndim == 3 else a, x.shape[2]) for a in (B, C))  # (b, t, d, n)
    d = step_size(dt, dt_bias, dt_softplus, (-math.inf, math.inf))

    def step(row: int, t: int, h: Array) -> tuple[Array, Array]:
        factor = of.exp(d[row, t][:, None] * A)
        factor = factor if decay is None else decay[row, t][:, None] * factor
        h = factor * h + (d[row, t] * x[row, t])[:, None] * B[row, t]
        return (h * C[row, t]).sum(-1), h

    y, states = walk(x, cu_seqlens, initial, A.shape, step)
    return finish(y, x, D, z), states


def selective_scan_step(x, dt, A, B, C, state, D=None, z=None, dt_bias=None, decay=None, dt_softplus=False):
    """Return ``y`` and the state after one token, or a few if the inputs have a time axis."""
    timed = {"x": x, "dt": dt, "B": B, "C": C, "z": z, "decay": decay}
    rest = {"A": A, "D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus}
    return one_token(selective_scan, timed, x.ndim == 2, initial_state=state, **rest)
