"""The definition of the Mamba-2 scan."""

from __future__ import annotations

import math

from refold.ops.definition import Array, finish, library, one_token, per_head, step_size, walk, wide


def ssd(
    x: Array, dt: Array, A: Array, B: Array, C: Array, D: Array | None = None, z: Array | None = None,
    dt_bias: Array | None = None, initial_state: Array | None = None, cu_seqlens: Array | None = None,
    dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, math.inf),
    chunk_size: int | None = None, state_dtype: object = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Return ``y`` and the last state of each sequence; the chunk size changes nothing."""
    x, dt, A, B, C, D, z, dt_bias, initial_state = wide(x, dt, A, B, C, D, z, dt_bias, initial_state)
    of, (nheads, headdim) = library(x), x.shape[2:]
    B, C = per_head(B, nheads), per_head(C, nheads)  # (b, t, h, n)
    d = step_size(dt, dt_bias, dt_softplus, dt_limit)

    def step(row: int, t: int, h: Array) -> tuple[Array, Array]:
        write = (d[row, t][:, None] * x[row, t])[:, :, None] * B[row, t][:, None, :]
        h = of.exp(d[row, t] * A)[:, None, None] * h + write
        return of.einsum("hpn,hn->hp", h, C[row, t]), h

    y, states = walk(x, cu_seqlens, initial_state, (nheads, headdim, B.shape[-1]), step)
    return finish(y, x, D if D is None or D.ndim == 2 else D[:, None], z), states


def ssd_step(x, dt, A, B, C, state, D=None, z=None, dt_bias=None, dt_softplus=False, dt_limit=(0.0, math.inf)):
    """Return ``y`` and the state after one token, or a few if the inputs have a time axis."""
    rest = {"A": A, "D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
    return one_token(ssd, {"x": x, "dt": dt, "B": B, "C": C, "z": z}, x.ndim == 3, initial_state=state, **rest)
