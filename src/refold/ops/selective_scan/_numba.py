"""The Mamba-1 scan on the CPU in one sweep: compiled by Numba, state and decays in the first-level cache.

The torch backend needs five passes over (t, n, d) because a torch operation does one thing to a whole array. Here a
block of channels walks the sequence once and nothing of that size exists. The exponential is written out, for
compilers do not vectorise a call to the library's.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from refold.ops import _numba_blocks
from refold.ops._numba_blocks import share_out, spans_of, zeros_or_copy
from refold.ops._torch_pointwise import finish, step_size
from refold.ops.spec import Meta

__all__ = ["selective_scan", "selective_scan_step", "supports"]

CHANNELS = 64
"""Channels of a block. Measured at 2048 x 1536 x 16 on two Xeon cores: 23 ms with 16, 13.5 with 32, 12.0 with 64."""


def supports(meta: Meta) -> str | None:
    """Tell why these arguments cannot be run."""
    if "decay" in meta.arrays:
        return "has no decay argument"
    return _numba_blocks.supports(meta)


def selective_scan(
    *, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, decay: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None,
    dt_softplus: bool, state_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `refold.ops.selective_scan`."""
    batch, seqlen, channels = x.shape
    spans = spans_of("selective_scan", batch, seqlen, cu_seqlens)
    B, C = (p if p.ndim == 4 else p[:, :, None] for p in (B, C))
    wide, B, C = (p.float().contiguous() for p in (x, B, C))
    step = step_size(dt, dt_bias, dt_softplus, None).contiguous()
    rates = (A.double().mT * math.log2(math.e)).float().contiguous()
    state = zeros_or_copy(None if initial_state is None else initial_state.mT, len(spans), *rates.shape)
    y = torch.empty_like(wide)
    edges = sorted({i * channels // p.shape[2] for p in (B, C) for i in range(p.shape[2] + 1)})
    share_out(_sweep, (wide, step, rates, B, C, y, state), spans, edges, CHANNELS, wide.numel() * rates.shape[0])
    return finish(y, wide, D, z).to(x.dtype), state.mT.to(state_dtype or torch.float32).contiguous()


def selective_scan_step(
    *, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, dt_softplus: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `refold.ops.selective_scan_step`: a short scan."""
    one = x.ndim == 2
    if one:
        x, dt, B, C = (a[:, None] for a in (x, dt, B, C))
        z = None if z is None else z[:, None]
    y, state = selective_scan(
        x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, decay=None, initial_state=state, cu_seqlens=None,
        dt_softplus=dt_softplus, state_dtype=state.dtype,
    )  # fmt: skip
    return y[:, 0] if one else y, state


@numba.njit(nogil=True, inline="always", fastmath={"contract"})
def _exp2(v: Any) -> Any:
    """Return 2^v: the polynomial errs by less than 2e-9, its exponent is set by adding to the bits.

    Below -127 the result is 0, above 128 infinite. Adding 1.5 x 2^23 rounds to an integer, left in the low bits.
    """
    v = min(max(v, np.float32(-127.0)), np.float32(128.0))
    shifted = np.float32(v + np.float32(12582912.0))
    f = v - (shifted - np.float32(12582912.0))
    p = np.float32(1.53533619e-04)
    p = p * f + np.float32(1.33988744e-03)
    p = p * f + np.float32(9.61843736e-03)
    p = p * f + np.float32(5.55033247e-02)
    p = p * f + np.float32(2.40226479e-01)
    p = p * f + np.float32(6.93147203e-01)
    p = np.float32(p * f + np.float32(1.0))
    exponent = np.int32(shifted.view(np.int32) << np.int32(23))
    return np.int32(p.view(np.int32) + exponent).view(np.float32)


@numba.njit(nogil=True, fastmath={"contract"})
def _sweep(x: Any, step: Any, rates: Any, B: Any, C: Any, y: Any, state: Any, blocks: Any) -> None:
    """Scan sequences over blocks of channels, each in one group of B and one of C; overwrites ``state`` (k, n, d)."""
    states, channels = rates.shape
    # A block that is not full computes zeros in the rest, for loops of constant length are what vectorises.
    a, h = np.empty((states, CHANNELS), np.float32), np.empty((states, CHANNELS), np.float32)
    s, u, out = np.empty(CHANNELS, np.float32), np.empty(CHANNELS, np.float32), np.empty(CHANNELS, np.float32)
    for row, start, stop, k, low, high in blocks:
        width, of_B, of_C = high - low, low * B.shape[2] // channels, low * C.shape[2] // channels
        a[:], h[:], s[:], u[:] = 0, 0, 0, 0
        a[:, :width], h[:, :width] = rates[:, low:high], state[k, :, low:high]
        for t in range(start, stop):
            for c in range(width):
                s[c] = step[row, t, low + c]
                u[c] = s[c] * x[row, t, low + c]
            out[:] = 0
            for n in range(states):
                b, q = B[row, t, of_B, n], C[row, t, of_C, n]
                for c in range(CHANNELS):
                    h[n, c] = _exp2(s[c] * a[n, c]) * h[n, c] + u[c] * b
                    out[c] += h[n, c] * q
            for c in range(width):
                y[row, t, low + c] = out[c]
        state[k, :, low:high] = h[:, :width]
