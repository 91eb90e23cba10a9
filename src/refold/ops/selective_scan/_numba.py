"""The Mamba-1 scan on the CPU in one sweep: compiled by Numba, state and decays in the first-level cache.

The torch backend needs five passes over (t, n, d), because a torch operation does one thing to a whole array. Here a
block of channels goes over the sequence once, and no array of that size exists. The exponential is written out, because
compilers do not vectorise a call of the library's.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from refold.ops.numba.blocks import share_out, spans_of, supports, zeros_or_copy
from refold.ops.numba.kernel import kernel
from refold.ops.numba.tiles import read_tile, tile_of, widest_vectors, write_tile
from refold.ops.selective_scan.spec import SPEC, STEP
from refold.ops.torch.pointwise import finish, step_size
from refold.ops.torch.short import short_scan

__all__ = ["selective_scan", "selective_scan_step", "supports"]

CHANNELS = 64
"""Channels of a block: state and decays of 64 x 16 take a sixth of the first-level cache."""
TOKENS = 32
"""Tokens whose inputs are fetched before they are needed one by one: each lies in a page of its own."""


def selective_scan(
    *, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, decay: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None,
    dt_softplus: bool, state_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `refold.ops.selective_scan`."""
    batch, seqlen, channels = x.shape
    spans = spans_of("selective_scan", batch, seqlen, cu_seqlens)
    B, C = (p if p.ndim == 4 else p[:, :, None] for p in (B, C))
    factor = x.new_empty(0, 0, 0) if decay is None else decay
    wide, B, C, factor = (p.float().contiguous() for p in (x, B, C, factor))
    step = step_size(dt, dt_bias, dt_softplus, None).contiguous()
    rates = (A.double().mT * math.log2(math.e)).float().contiguous()
    state = zeros_or_copy(None if initial_state is None else initial_state.mT, len(spans), *rates.shape)
    y = torch.empty_like(wide)
    edges = tuple(sorted({i * channels // p.shape[2] for p in (B, C) for i in range(p.shape[2] + 1)}))
    arrays = (wide, step, factor, rates, B, C, y, state)
    share_out(_sweep, arrays, spans, edges, CHANNELS, wide.numel() * rates.shape[0])(*arrays)
    return finish(y, wide, D, z).to(x.dtype), state.mT.to(state_dtype or torch.float32).contiguous()


selective_scan_step = short_scan(SPEC, STEP, selective_scan)


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


@kernel(fastmath={"contract"})
def _sweep(
    x: Any, step: Any, factor: Any, rates: Any, B: Any, C: Any, y: Any, state: Any, blocks: Any
) -> None:  # fmt: skip
    """Scan sequences over blocks of channels, each in one group of B and one of C; overwrites ``state`` (k, n, d).

    ``factor`` is the second factor of states, next to the exponential, or empty.
    """
    widest_vectors()
    states, channels = rates.shape
    a, h = tile_of(states, CHANNELS, 0), tile_of(states, CHANNELS, 2)
    s, u = tile_of(TOKENS, CHANNELS, 0), tile_of(TOKENS, CHANNELS, 1)
    out, g = tile_of(TOKENS, CHANNELS, 2), tile_of(TOKENS, CHANNELS, 3)
    for row, start, stop, k, low, high in blocks:
        of_B, of_C = low * B.shape[2] // channels, low * C.shape[2] // channels
        read_tile(rates, 0, low, high, a, states)
        read_tile(state[k], 0, low, high, h, states)
        for first in range(start, stop, TOKENS):
            tokens = min(TOKENS, stop - first)
            read_tile(step[row], first, low, high, s, tokens)
            read_tile(x[row], first, low, high, u, tokens)
            if factor.size:
                read_tile(factor[row], first, low, high, g, tokens)
            for i in range(tokens):
                for c in range(CHANNELS):
                    u[i, c] *= s[i, c]
                    out[i, c] = 0
                if factor.size:
                    for n in range(states):
                        for c in range(CHANNELS):
                            h[n, c] *= g[i, c]
                for n in range(states):
                    b, q = B[row, first + i, of_B, n], C[row, first + i, of_C, n]
                    for c in range(CHANNELS):
                        h[n, c] = _exp2(s[i, c] * a[n, c]) * h[n, c] + u[i, c] * b
                        out[i, c] += h[n, c] * q
            write_tile(out, tokens, y[row], first, low, high)
        write_tile(h, states, state[k], 0, low, high)
