"""Coupled recurrences and running maxima on the CPU, one step after the other, compiled by Numba.

A sweep over time reads its inputs once and writes its states once. Composing pairs of steps, which suits a GPU, takes
log2 of the length in passes over memory. Steps are taken in the order of the loop, so no digit is lost. Blocks of lanes
(the elements of a state) go to threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...ops.numba.blocks import share_out
from ...ops.numba.kernel import kernel

LANES = 256
"""Lanes of a block: the states of a few coupled values, old and new, stay in the first-level cache."""


def system(A: Tensor, b: Tensor, initial: Tensor | None, reverse: bool, dtype: torch.dtype) -> Tensor:
    """Compute `refold.compiler.recurrence.systems.linear_system`, with states of ``dtype`` in between."""
    size, steps = b.shape[:2]
    h = torch.empty(b.shape, dtype=b.dtype)
    start = torch.zeros(size, 1, dtype=b.dtype) if initial is None else initial.reshape(size, -1)
    given = torch.tensor([initial is not None, reverse])
    flat = [
        x.resolve_conj().resolve_neg().contiguous()
        for x in (A.reshape(size, size, A.shape[2], -1), b.reshape(size, steps, -1), start)
    ]
    # An entry that is zero at all steps, as between values that do not read each other, is not multiplied.
    entries = flat[0].ne(0).flatten(2).any(-1) if A.shape[2] == 1 else torch.ones(size, size, dtype=torch.bool)
    arrays = (*flat, h.view(size, steps, -1), entries, given, torch.empty(0, dtype=dtype))
    share_out(_system, arrays, [()], (0, flat[1].shape[2]), LANES, size * size * flat[1][0].numel())
    return h


def maxima(shift: Tensor, floor: Tensor, initial: Tensor, smooth: bool) -> Tensor:
    """Compute `refold.compiler.recurrence.systems.max_plus_scan`."""
    h, steps = torch.empty(floor.shape, dtype=floor.dtype), floor.shape[0]
    flat = [x.contiguous() for x in (shift.reshape(shift.shape[0], -1), floor.reshape(steps, -1), initial.reshape(-1))]
    arrays = (*flat, h.view(steps, -1), torch.tensor([smooth]))
    share_out(_maxima, arrays, [()], (0, flat[2].shape[0]), LANES, floor.numel())
    return h


def handed_back(share: Tensor, grad: Tensor) -> Tensor:
    """Return ``lam[t] = grad[t] + share[t + 1] lam[t + 1]``; a share of zero reads nothing."""
    lam, steps = torch.empty(grad.shape, dtype=grad.dtype), grad.shape[0]
    arrays = (*(x.reshape(steps, -1).contiguous() for x in (share, grad)), lam.view(steps, -1))
    share_out(_handed_back, arrays, [()], (0, arrays[2].shape[1]), LANES, grad.numel())
    return lam


@kernel(fastmath={"contract"})
def _system(A: Any, b: Any, start: Any, h: Any, entries: Any, flags: Any, like: Any, blocks: Any) -> None:
    """Sweep over time; the flags say whether there is a first state, and whether the last step comes first."""
    size, steps, _ = b.shape
    old, new = np.empty((size, LANES), like.dtype), np.empty((size, LANES), like.dtype)
    for low, high in blocks:
        width = high - low
        if flags[0]:
            for i in range(size):
                row, first = old[i], start[i, low:high]
                for c in range(width):
                    row[c] = first[c]
        for n in range(steps):
            t = steps - 1 - n if flags[1] else n
            for i in range(size):
                row, inputs, states = new[i], b[i, t, low:high], h[i, t, low:high]
                for c in range(width):
                    row[c] = inputs[c]
                if n or flags[0]:
                    for j in range(size):
                        if not entries[i, j]:
                            continue
                        factors, before = A[i, j, t if A.shape[2] > 1 else 0, low:high], old[j]
                        for c in range(width):
                            row[c] += factors[c] * before[c]
                for c in range(width):
                    states[c] = row[c]
            old, new = new, old


@kernel()
def _maxima(shift: Any, floor: Any, start: Any, h: Any, smooth: Any, blocks: Any) -> None:
    """Sweep over time; what is not a number stays so, as with PyTorch's maximum."""
    last = np.empty(LANES, h.dtype)
    for low, high in blocks:
        width = high - low
        first = start[low:high]
        for c in range(width):
            last[c] = first[c]
        for t in range(len(floor)):
            moves, floors, states = shift[t if len(shift) > 1 else 0, low:high], floor[t, low:high], h[t, low:high]
            if smooth[0]:
                for c in range(width):
                    a, b = last[c] + moves[c], floors[c]
                    top = a if a > b or a != a else b
                    last[c] = top if np.isinf(top) else top + np.log1p(np.exp(-abs(a - b)))
                    states[c] = last[c]
            else:
                for c in range(width):
                    a, b = last[c] + moves[c], floors[c]
                    last[c] = a if a > b or a != a else b
                    states[c] = last[c]


@kernel()
def _handed_back(share: Any, grad: Any, lam: Any, blocks: Any) -> None:
    last = np.empty(LANES, lam.dtype)
    for low, high in blocks:
        width = high - low
        last[:width] = 0
        for n in range(len(grad)):
            t = len(grad) - 1 - n
            shares, grads, adjoints = share[t, low:high], grad[t, low:high], lam[t, low:high]
            for c in range(width):
                adjoint = grads[c] + last[c]
                adjoints[c] = adjoint
                last[c] = shares[c] * adjoint if shares[c] != 0 else 0
