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
from .systems import all_steps

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
    matrices, inputs = _flat(A), _flat(b)
    start = np.empty(0, inputs.dtype) if initial is None else _flat(initial)
    lanes, times = inputs.size // (size * steps), A.shape[2]
    widths = matrices.size // (size * size * times)
    results, sizes = h.numpy().reshape(-1), (size, steps, lanes, times, widths)
    arrays = (matrices, inputs, start, results, reverse, _LIKE[dtype], sizes)
    share_out(_system, arrays, ((),), (0, lanes), LANES, size * size * steps * lanes)
    return h


def bounded(
    scale: Tensor | None, shift: Tensor, low: Tensor, high: Tensor | None, initial: Tensor, smooth: bool
) -> Tensor:
    """Compute `refold.compiler.recurrence.systems.bounded_scan`."""
    h = all_steps(scale, shift, low)
    start = _flat(initial)
    none = np.empty((0, 0), start.dtype)
    operands = (none if x is None else _flat(x, len(x)) for x in (scale, shift, low, high))
    arrays = (*operands, start, h.numpy().reshape(len(h), -1), smooth)
    share_out(_bounded, arrays, ((),), (0, start.size), LANES, h.numel())
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
def _system(A: Any, b: Any, start: Any, h: Any, reverse: Any, like: Any, sizes: Any, blocks: Any) -> None:
    """Sweep over time; without a first state, ``start`` is empty. All arrays have one axis."""
    size, steps, lanes, times, widths = sizes
    # An entry that is zero at all steps, as between values that do not read each other, is not multiplied.
    entries, counts = np.empty((size, size), np.int64), np.zeros(size, np.int64)
    for i in range(size):
        for j in range(size):
            some = times > 1
            for c in range(0 if some else widths):
                some = some or A[(i * size + j) * widths + c] != 0
            if some:
                entries[i, counts[i]] = j
                counts[i] += 1
    begins = start.size > 0
    old, new = np.empty(size * LANES, like.dtype), np.empty(size * LANES, like.dtype)
    for low, high in blocks:
        width = np.uintp(high - low)
        if begins:
            for i in range(size):
                row, first = np.uintp(i * LANES), np.uintp(i * lanes + low)
                for c in range(width):
                    old[row + c] = start[first + c]
        for n in range(steps):
            t = steps - 1 - n if reverse else n
            for i in range(size):
                row, now, read = np.uintp(i * LANES), np.uintp((i * steps + t) * lanes + low), 0
                if n or begins:
                    read = counts[i]
                at = (i * size * times + (t if times > 1 else 0)) * widths
                if read == 0 or widths > 1:
                    for c in range(width):
                        new[row + c] = b[now + c]
                    for k in range(read):
                        j = entries[i, k]
                        before, factors = np.uintp(j * LANES), np.uintp(at + j * times * widths + low)
                        for c in range(width):
                            new[row + c] += A[factors + c] * old[before + c]
                    for c in range(width):
                        h[now + c] = new[row + c]
                    continue
                # Up to three in one pass over the lanes.
                j, m = entries[i, 0], entries[i, 1 if read > 1 else 0]
                one, two = np.uintp(j * LANES), np.uintp(m * LANES)
                by_one, by_two = like.dtype.type(A[at + j * times]), like.dtype.type(A[at + m * times])
                if read == 1:
                    for c in range(width):
                        value = b[now + c] + by_one * old[one + c]
                        new[row + c] = value
                        h[now + c] = value
                elif read == 2:
                    for c in range(width):
                        value = (b[now + c] + by_one * old[one + c]) + by_two * old[two + c]
                        new[row + c] = value
                        h[now + c] = value
                else:
                    j = entries[i, 2]
                    three, by_three = np.uintp(j * LANES), like.dtype.type(A[at + j * times])
                    for c in range(width):
                        value = (b[now + c] + by_one * old[one + c]) + by_two * old[two + c] + by_three * old[three + c]
                        new[row + c] = value
                        h[now + c] = value
                    for k in range(3, read):
                        j = entries[i, k]
                        before, factor = np.uintp(j * LANES), like.dtype.type(A[at + j * times])
                        for c in range(width):
                            new[row + c] += factor * old[before + c]
                    if read > 3:
                        for c in range(width):
                            h[now + c] = new[row + c]
            old, new = new, old


@kernel()
def _bounded(scale: Any, shift: Any, low: Any, high: Any, start: Any, h: Any, smooth: Any, blocks: Any) -> None:
    """Sweep over time; what is not a number stays so, as with PyTorch's maximum. Empty operands are none."""
    last = np.empty(LANES, h.dtype)
    for begin, end in blocks:
        width = end - begin
        first = start[begin:end]
        for c in range(width):
            last[c] = first[c]
        for t in range(len(h)):
            moves, floors = shift[t if len(shift) > 1 else 0, begin:end], low[t if len(low) > 1 else 0, begin:end]
            states = h[t, begin:end]
            if len(scale):
                factors = scale[t if len(scale) > 1 else 0, begin:end]
                for c in range(width):
                    last[c] *= factors[c]
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
            if len(high):
                tops = high[t if len(high) > 1 else 0, begin:end]
                for c in range(width):
                    a, b = last[c], tops[c]
                    last[c] = a if a < b or a != a else b
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
