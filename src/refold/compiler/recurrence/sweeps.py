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

MOST = 16
"""Coupled values of one system: a sweep multiplies no matrices."""
LANES = 256
"""Lanes of a block: the states of a few coupled values, old and new, stay in the first-level cache."""

# Arrays, as a module that is imported while PyTorch traces makes fake tensors.
_LIKE = {
    torch.float32: np.empty(0, np.float32),
    torch.float64: np.empty(0, np.float64),
    torch.complex64: np.empty(0, np.complex64),
    torch.complex128: np.empty(0, np.complex128),
}


def system(A: Tensor, b: Tensor, initial: Tensor | None, reverse: bool, dtype: torch.dtype) -> Tensor:
    """Compute `refold.compiler.recurrence.systems.linear_system`, with states of ``dtype`` in between."""
    size, steps = b.shape[:2]
    h = torch.empty_like(b, memory_format=torch.contiguous_format)
    if A.shape[3:] != b.shape[2:] and A.shape[3:].numel() > 1:
        A = A.expand(*A.shape[:3], *b.shape[2:])
    matrices, inputs = _flat(A, size, size, A.shape[2]), _flat(b, size, steps)
    start = np.empty((size, 0), inputs.dtype) if initial is None else _flat(initial, size)
    # An entry that is zero at all steps, as between values that do not read each other, is not multiplied.
    entries = matrices.any((2, 3)) if A.shape[2] == 1 else np.ones((size, size), np.bool_)
    lanes = inputs.shape[2]
    arrays = (matrices, inputs, start, h.view(size, steps, lanes), entries, reverse, _LIKE[dtype])
    share_out(_system, arrays, ((),), (0, lanes), LANES, size * size * steps * lanes)
    return h


def maxima(shift: Tensor, floor: Tensor, initial: Tensor, smooth: bool) -> Tensor:
    """Compute `refold.compiler.recurrence.systems.max_plus_scan`."""
    h, steps = torch.empty_like(floor, memory_format=torch.contiguous_format), floor.shape[0]
    arrays = (_flat(shift, len(shift)), _flat(floor, steps), _flat(initial), h.view(steps, -1), smooth)
    share_out(_maxima, arrays, ((),), (0, initial.numel()), LANES, floor.numel())
    return h


def handed_back(share: Tensor, grad: Tensor) -> Tensor:
    """Return ``lam[t] = grad[t] + share[t + 1] lam[t + 1]``; a share of zero reads nothing."""
    lam, steps = torch.empty_like(grad, memory_format=torch.contiguous_format), grad.shape[0]
    arrays = (_flat(share, steps), _flat(grad, steps), lam.view(steps, -1))
    share_out(_handed_back, arrays, ((),), (0, grad.numel() // steps), LANES, grad.numel())
    return lam


def _flat(x: Tensor, *leading: int) -> np.ndarray:
    """Return a tensor as a contiguous array of all lanes, after the leading axes; reshaping one costs little."""
    array: np.ndarray = x.detach().resolve_conj().resolve_neg().numpy()
    return np.ascontiguousarray(array.reshape(*leading, -1))


@kernel(fastmath={"contract"})
def _system(A: Any, b: Any, start: Any, h: Any, entries: Any, reverse: Any, like: Any, blocks: Any) -> None:
    """Sweep over time; without a first state, ``start`` is empty."""
    size, steps, _ = b.shape
    begins = start.size > 0
    old, new = np.empty((size, LANES), like.dtype), np.empty((size, LANES), like.dtype)
    for low, high in blocks:
        width = high - low
        if begins:
            for i in range(size):
                row, first = old[i], start[i, low:high]
                for c in range(width):
                    row[c] = first[c]
        for n in range(steps):
            t = steps - 1 - n if reverse else n
            for i in range(size):
                row, inputs, states = new[i], b[i, t, low:high], h[i, t, low:high]
                for c in range(width):
                    row[c] = inputs[c]
                if n or begins:
                    for j in range(size):
                        if not entries[i, j]:
                            continue
                        at, before = t if A.shape[2] > 1 else 0, old[j]
                        if A.shape[3] > 1:
                            factors = A[i, j, at, low:high]
                            for c in range(width):
                                row[c] += factors[c] * before[c]
                        else:
                            factor = like.dtype.type(A[i, j, at, 0])
                            for c in range(width):
                                row[c] += factor * before[c]
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
            if smooth:
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
