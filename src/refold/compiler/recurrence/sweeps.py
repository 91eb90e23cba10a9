"""Coupled recurrences and running maxima on the CPU, one step after the other, compiled by Numba.

A sweep over time reads its inputs once and writes its states once. Composing pairs of steps, which suits a GPU, takes
log2 of the length in passes over memory. Steps are taken in the order of the loop, so no digit is lost. Blocks of lanes
(the elements of a state) go to threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...ops.numba.blocks import ArgumentPlace, share_out
from ...ops.numba.kernel import kernel
from .systems import all_steps

MOST = 16
"""Coupled values of one system: a sweep multiplies no matrices."""
LANES = 256
"""Lanes of a block: the states of a few coupled values, old and new, stay in the first-level cache."""


def system(
    A: Tensor, b: Tensor, initial: Tensor | None, reverse: bool, copies: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Compute `refold.compiler.recurrence.systems.linear_system`, with states of ``dtype`` in between."""
    h = torch.empty_like(b, memory_format=torch.contiguous_format)
    if A.shape[3:] != b.shape[2:] and A.shape[3:].numel() > 1:
        A = A.expand(*A.shape[:3], *b.shape[2:])
    begins = initial is not None
    sweep, states, entries = _prepared(A.shape, b.shape, b.dtype, dtype, begins, reverse, tuple(copies))
    begin = () if initial is None else (_plain(initial),)
    sweep(_plain(A), _plain(b), *begin, h, torch.empty(states, dtype=dtype), torch.empty(entries, dtype=torch.int64))
    return h


@lru_cache(maxsize=64)
def _prepared(
    matrices: torch.Size, inputs: torch.Size, dtype: torch.dtype, wide: torch.dtype, begins: bool, reverse: bool,
    copies: tuple[int, ...],
) -> tuple[Callable[..., None], int, int]:  # fmt: skip
    """Return the sweep over systems of these shapes, and what it needs in between: states, old and new, and indices."""
    rows, steps, *rest = inputs
    size, lanes, times = matrices[1], math.prod(rest), matrices[2]
    sizes = np.array([size, rows, steps, lanes, times, matrices[3:].numel()])
    start = ArgumentPlace(dtype, (size * lanes,)) if begins else np.empty(0, str(dtype).removeprefix("torch."))
    whole, states = ArgumentPlace(dtype, (inputs.numel(),)), ArgumentPlace(wide, (2 * size * lanes,))
    entries = ArgumentPlace(torch.int64, (-(-lanes // LANES) * size * (size + 1),))
    copied = np.array(copies, np.int64)
    given = (sizes, reverse, copied, ArgumentPlace(dtype, (matrices.numel(),)), whole, start, whole, states, entries)
    sweep = share_out(_system, given, ((),), (0, lanes), LANES, rows * size * steps * lanes)
    return sweep, states.shape[0], entries.shape[0]


def bounded(
    scale: Tensor | None, shift: Tensor, low: Tensor, high: Tensor | None, initial: Tensor, smooth: bool
) -> Tensor:
    """Compute `refold.compiler.recurrence.systems.bounded_scan`."""
    h = all_steps(scale, shift, low)
    counts = tuple([0 if x is None else x.shape[0] for x in (scale, shift, low, high)])
    operands = [_plain(x) for x in (scale, shift, low, high, initial) if x is not None]
    sweep, lanes = _prepared_bounds(counts, h.shape, h.dtype, smooth)
    sweep(*operands, h, torch.empty(lanes, dtype=h.dtype))
    return h


@lru_cache(maxsize=64)
def _prepared_bounds(
    counts: tuple[int, ...], shape: torch.Size, dtype: torch.dtype, smooth: bool
) -> tuple[Callable[..., None], int]:
    """Return the sweep for bounds with so many steps (0 without one), and how many states it keeps in between."""
    steps, *rest = shape
    lanes = math.prod(rest)
    none = np.empty(0, str(dtype).removeprefix("torch."))
    operands = [ArgumentPlace(dtype, (count * lanes,)) if count else none for count in counts]
    state, whole = ArgumentPlace(dtype, (lanes,)), ArgumentPlace(dtype, (steps * lanes,))
    if smooth:
        counts, operands = counts[1:3], operands[1:3]
    given = (np.array([steps, lanes, *counts]), *operands, state, whole, state)
    return share_out(_smooth if smooth else _bounded, given, ((),), (0, lanes), LANES, steps * lanes), lanes


def _plain(x: Tensor) -> Tensor:
    """Return a contiguous tensor whose memory holds its values."""
    x = x.resolve_conj().resolve_neg()
    return x if x.is_contiguous() else x.contiguous()


@kernel(fastmath={"contract"})
def _system(
    sizes: Any, reverse: Any, copies: Any, A: Any, b: Any, start: Any, h: Any, states: Any, entries: Any, blocks: Any
) -> None:
    """Sweep over time; without a first state, ``start`` is empty. All arrays have one axis."""
    size, rows, steps, lanes, times, widths = sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]
    begins = start.size > 0
    for low, high in blocks:
        # An entry that is zero at all steps, as between values that do not read each other, is not multiplied. For each
        # row: how many are not zero, and which.
        first, width = low // LANES * size * (size + 1), np.uintp(high - low)
        for i in range(rows):
            row, read = first + i * (size + 1), 0
            for j in range(size):
                some, at = times > 1, (i * size + j) * widths
                for c in range(0 if some else min(widths, high - low)):
                    some = some or A[at + (low + c if widths > 1 else 0)] != 0
                if some:
                    read += 1
                    entries[row + read] = j
            entries[row] = read
        old, new = states[2 * size * low : size * (low + high)], states[size * (low + high) : 2 * size * high]
        if begins:
            for i in range(size):
                row, begin = np.uintp(i) * width, np.uintp(i * lanes + low)
                for c in range(width):
                    old[row + c] = start[begin + c]
        for n in range(steps):
            t = steps - 1 - n if reverse else n
            for k in range(size - rows):
                row, copied = np.uintp(rows + k) * width, np.uintp(copies[k]) * width
                for c in range(width):
                    new[row + c] = old[copied + c] if n or begins else 0
            for i in range(rows):
                row, now = np.uintp(i) * width, np.uintp((i * steps + t) * lanes + low)
                which = first + i * (size + 1)
                read = entries[which] if n or begins else 0
                which += 1
                at = (i * size * times + (t if times > 1 else 0)) * widths
                if read == 0 or widths > 1:
                    for c in range(width):
                        new[row + c] = b[now + c]
                    for k in range(read):
                        j = entries[which + k]
                        before, factors = np.uintp(j) * width, np.uintp(at + j * times * widths + low)
                        for c in range(width):
                            new[row + c] += A[factors + c] * old[before + c]
                    for c in range(width):
                        h[now + c] = new[row + c]
                    continue
                # Up to three in one pass over the lanes.
                j, m = entries[which], entries[which + (1 if read > 1 else 0)]
                one, two = np.uintp(j) * width, np.uintp(m) * width
                by_one, by_two = states.dtype.type(A[at + j * times]), states.dtype.type(A[at + m * times])
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
                    j = entries[which + 2]
                    three, by_three = np.uintp(j) * width, states.dtype.type(A[at + j * times])
                    for c in range(width):
                        value = (b[now + c] + by_one * old[one + c]) + by_two * old[two + c] + by_three * old[three + c]
                        new[row + c] = value
                        h[now + c] = value
                    for k in range(3, read):
                        j = entries[which + k]
                        before, factor = np.uintp(j) * width, states.dtype.type(A[at + j * times])
                        for c in range(width):
                            new[row + c] += factor * old[before + c]
                    if read > 3:
                        for c in range(width):
                            h[now + c] = new[row + c]
            old, new = new, old


@kernel()
def _bounded(
    sizes: Any, scale: Any, shift: Any, low: Any, high: Any, start: Any, h: Any, last: Any, blocks: Any
) -> None:
    """Sweep over time; what is not a number stays so, as with PyTorch's maximum. Empty operands are none."""
    steps, lanes = sizes[0], sizes[1]
    scales, shifts, lows, highs = sizes[2] > 1, sizes[3] > 1, sizes[4] > 1, sizes[5] > 1
    for begin, end in blocks:
        first, width = np.uintp(begin), np.uintp(end - begin)
        for c in range(width):
            last[first + c] = start[first + c]
        for t in range(steps):
            now = np.uintp(t * lanes + begin)
            moves, floors = now if shifts else first, now if lows else first
            if scale.size:
                factors = now if scales else first
                for c in range(width):
                    a, b = scale[factors + c] * last[first + c] + shift[moves + c], low[floors + c]
                    state = a if a > b or a != a else b
                    last[first + c] = state
                    h[now + c] = state
            else:
                for c in range(width):
                    a, b = last[first + c] + shift[moves + c], low[floors + c]
                    state = a if a > b or a != a else b
                    last[first + c] = state
                    h[now + c] = state
            if high.size:
                tops = now if highs else first
                for c in range(width):
                    a, b = last[first + c], high[tops + c]
                    state = a if a < b or a != a else b
                    last[first + c] = state
                    h[now + c] = state


@kernel()
def _smooth(sizes: Any, shift: Any, floor: Any, start: Any, h: Any, last: Any, blocks: Any) -> None:
    """Sweep over time with ``logaddexp`` in place of the maximum."""
    steps, lanes, shifts, floors = sizes[0], sizes[1], sizes[2] > 1, sizes[3] > 1
    for begin, end in blocks:
        for c in range(begin, end):
            last[c] = start[c]
        for t in range(steps):
            now = t * lanes
            for c in range(begin, end):
                a, b = last[c] + shift[c + (now if shifts else 0)], floor[c + (now if floors else 0)]
                top = a if a > b or a != a else b
                last[c] = top if np.isinf(top) else top + np.log1p(np.exp(-abs(a - b)))
                h[now + c] = last[c]
