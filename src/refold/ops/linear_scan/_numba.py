"""The elementwise recurrence on the CPU in one sweep over memory: compiled by Numba, the state in cache.

It reads a and x and writes h once, which is all that the result needs; the torch backend copies what it then updates.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from refold.ops._numba_blocks import share_out, spans_of, supports, zeros_or_copy

__all__ = ["linear_scan", "supports"]

CHANNELS = 512
"""Elements of the state in a block: long enough for whole pages to be read in turn."""


def linear_scan(
    *, a: Tensor, x: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor]:
    """Compute `refold.ops.linear_scan`."""
    batch, seqlen, *rest = x.shape
    spans = spans_of("linear_scan", batch, seqlen, cu_seqlens)
    factors, inputs = (array.float().flatten(2).contiguous() for array in (a[..., None], x[..., None]))
    state = zeros_or_copy(initial_state, len(spans), *rest)
    h = torch.empty_like(inputs)
    elements = inputs.shape[2]
    arrays = (factors, inputs, h, state.view(len(spans), elements), torch.tensor([reverse]))
    share_out(_sweep, arrays, spans, (0, elements), CHANNELS, inputs.numel())
    return h.view(x.shape).to(x.dtype), state


@numba.njit(nogil=True, fastmath={"contract"})
def _sweep(a: Any, x: Any, h: Any, state: Any, reverse: Any, blocks: Any) -> None:
    """Scan sequences over ranges of channels; overwrites ``state`` (k, elements)."""
    last = np.empty(CHANNELS, np.float32)
    for row, start, stop, k, low, high in blocks:
        width = high - low
        last[:width] = state[k, low:high]
        for i in range(start, stop):
            t = start + stop - 1 - i if reverse[0] else i
            # Slices, because an index that might count from the end keeps a loop from being vectorised.
            factors, inputs, states = a[row, t, low:high], x[row, t, low:high], h[row, t, low:high]
            for c in range(width):
                last[c] = factors[c] * last[c] + inputs[c]
                states[c] = last[c]
        state[k, low:high] = last[:width]
