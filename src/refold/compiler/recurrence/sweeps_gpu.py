"""Coupled recurrences and running maxima on a GPU, one step after the other, in Triton.

A program owns a few lanes (elements of a state) and keeps their coupled values in registers. It reads the inputs of
several steps at a time, before it computes them. That is one launch, where composing pairs of steps takes ten launches
for each of log2(steps) passes. The functions are those of `refold.compiler.recurrence.sweeps`.
"""

# Triton knows no starred tuples, and tuples grow.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, var-annotated"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .systems import all_steps, with_copies

MOST = 8
"""Coupled values of one system. Triton needs minutes to compile the 256 products of a step of 16."""
LANES = 32
"""Lanes of a program: one warp."""

_KINDS = {torch.float32: tl.float32, torch.float64: tl.float64, torch.complex128: tl.float64}


def system(
    A: Tensor, b: Tensor, initial: Tensor | None, reverse: bool, copies: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Compute `refold.compiler.recurrence.systems.linear_system`, with states of ``dtype`` in between."""
    if copies:
        return system(*with_copies(A, b, copies), initial, reverse, (), dtype)[: len(b)]
    size, steps = b.shape[:2]
    h = torch.empty_like(b, memory_format=torch.contiguous_format)
    if A.shape[3:] != b.shape[2:] and A.shape[3:].numel() > 1:
        A = A.expand(*A.shape[:3], *b.shape[2:])
    parts = 2 if b.is_complex() else 1
    matrices, inputs = _flat(A, size, size, A.shape[2]), _flat(b, size, steps)
    start = inputs if initial is None else _flat(initial, size)
    lanes, steady = inputs.shape[2], matrices.shape[2] == 1
    loads = parts * size * (1 if steady else 1 + size)
    _launch(
        _system_kernel, lanes, matrices, inputs, start, h, lanes, steps,
        *[0 if n == 1 else s for n, s in zip(matrices.shape[2:4], matrices.stride()[2:4], strict=True)],
        *matrices.stride()[:2], *inputs.stride()[:3], *start.stride()[:2],
        SIZE=size, STEADY=steady, BEGINS=initial is not None, REVERSE=reverse, PARTS=parts,
        AHEAD=max(1, min(8, 16 // loads)), LANED=matrices.shape[3] > 1, KIND=_KINDS[dtype],
    )  # fmt: skip
    return h


def bounded(
    scale: Tensor | None, shift: Tensor, low: Tensor, high: Tensor | None, initial: Tensor, smooth: bool
) -> Tensor:
    """Compute `refold.compiler.recurrence.systems.bounded_scan`."""
    h, start = all_steps(scale, shift, low), _flat(initial)
    operands = [_flat(x, len(x)) for x in (low if scale is None else scale, shift, low, low if high is None else high)]
    _launch(
        _bounded_kernel, start.numel(), *operands, start, h, start.numel(), len(h),
        *(stride for x in operands for stride in (x.stride(0) if len(x) > 1 else 0, x.stride(1))), *start.stride(),
        SCALED=scale is not None, LIMITED=high is not None, SMOOTH=smooth, AHEAD=8,
    )  # fmt: skip
    return h


def _flat(x: Tensor, *leading: int) -> Tensor:
    """Return a tensor with one axis of lanes after the leading ones, of real numbers: pairs for complex ones."""
    x = x.detach().reshape(*leading, -1)
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x.resolve_neg()


def _launch(kernel: Any, lanes: int, *args: Any, **consts: Any) -> None:
    tensors = [torch.view_as_real(x) if isinstance(x, Tensor) and x.is_complex() else x for x in args]
    device = args[0].device
    with torch.cuda.device(device if device.type == "cuda" else -1):
        kernel[(triton.cdiv(lanes, LANES),)](*tensors, **consts, LANES=LANES, num_warps=1)


@triton.jit
def _place(lane, step, steps, REVERSE: tl.constexpr):
    """Return the place of a step in time, for each lane: 64 bits, so that what it is multiplied with fits."""
    return lane * 0 + (steps - 1 - step if REVERSE else step)


@triton.jit
def _times(i: tl.constexpr, stride):
    """Multiply without overflow."""
    return tl.full((), i, tl.int64) * stride


@triton.jit
def _load(ptr, mask, KIND: tl.constexpr, PARTS: tl.constexpr):
    """Return a value's parts: the real one, and the imaginary one."""
    other = None if mask is None else 0.0
    if PARTS == 1:
        return (tl.load(ptr, mask=mask, other=other).to(KIND),)
    else:
        return (tl.load(ptr, mask=mask, other=other).to(KIND), tl.load(ptr + 1, mask=mask, other=other).to(KIND))


@triton.jit
def _add_product(total, a, x, STEADY: tl.constexpr, PARTS: tl.constexpr):
    """Return total + a x; an entry of a steady matrix that is zero reads nothing."""
    if PARTS == 1:
        real = total[0] + a[0] * x[0]
        if STEADY:
            real = tl.where(a[0] == 0, total[0], real)
        return (real,)
    else:
        real = total[0] + (a[0] * x[0] - a[1] * x[1])
        imag = total[1] + (a[0] * x[1] + a[1] * x[0])
        if STEADY:
            none = (a[0] == 0) & (a[1] == 0)
            real, imag = tl.where(none, total[0], real), tl.where(none, total[1], imag)
        return (real, imag)


@triton.jit
def _system_kernel(
    A_ptr, b_ptr, start_ptr, h_ptr, lanes, steps, A_time, A_lane, A_row, A_column, b_row, b_time, b_lane, start_row,
    start_lane,
    SIZE: tl.constexpr, STEADY: tl.constexpr, BEGINS: tl.constexpr, REVERSE: tl.constexpr, PARTS: tl.constexpr,
    AHEAD: tl.constexpr, LANED: tl.constexpr, KIND: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of lanes,)."""
    lane = (tl.program_id(0) * LANES + tl.arange(0, LANES)).to(tl.int64)
    mask = lane < lanes
    zero = tl.zeros((LANES,), KIND)
    none = (zero, zero) if PARTS == 2 else (zero,)
    old = ()
    for i in tl.static_range(SIZE):
        if BEGINS:
            old = old + (_load(start_ptr + _times(i, start_row) + lane * start_lane, mask, KIND, PARTS),)
        else:
            old = old + (none,)
    steady = ()
    if STEADY:
        for i in tl.static_range(SIZE):
            for j in tl.static_range(SIZE):
                at = A_ptr + _times(i, A_row) + _times(j, A_column)
                if LANED:
                    steady = steady + (_load(at + lane * A_lane, mask, KIND, PARTS),)
                else:  # one number for all lanes, which Triton compiles faster
                    steady = steady + (_load(at, None, KIND, PARTS),)
    for first in range(0, steps, AHEAD):
        inputs = ()
        matrices = ()
        for k in tl.static_range(AHEAD):
            live = mask & (_place(lane, first + k, steps, False) < steps)
            t = _place(lane, first + k, steps, REVERSE)
            for i in tl.static_range(SIZE):
                inputs = inputs + (_load(b_ptr + _times(i, b_row) + t * b_time + lane * b_lane, live, KIND, PARTS),)
                if not STEADY:
                    for j in tl.static_range(SIZE):
                        at = A_ptr + _times(i, A_row) + _times(j, A_column) + t * A_time + lane * A_lane
                        matrices = matrices + (_load(at, live, KIND, PARTS),)
        for k in tl.static_range(AHEAD):
            live = mask & (_place(lane, first + k, steps, False) < steps)
            t = _place(lane, first + k, steps, REVERSE)
            new = ()
            for i in tl.static_range(SIZE):
                total = inputs[k * SIZE + i]
                for j in tl.static_range(SIZE):
                    if STEADY:
                        total = _add_product(total, steady[i * SIZE + j], old[j], True, PARTS)
                    else:
                        total = _add_product(total, matrices[(k * SIZE + i) * SIZE + j], old[j], False, PARTS)
                if not BEGINS:  # nothing is before the first step, which no infinity makes NaN of
                    total = _unless(_place(lane, first + k, steps, False) == 0, total, inputs[k * SIZE + i], PARTS)
                place = h_ptr + ((_times(i, steps) + t) * lanes + lane) * PARTS
                for part in tl.static_range(PARTS):
                    tl.store(place + part, total[part].to(h_ptr.dtype.element_ty), mask=live)
                new = new + (total,)
            old = new


@triton.jit
def _unless(condition, x, other, PARTS: tl.constexpr):
    if PARTS == 1:
        return (tl.where(condition, other[0], x[0]),)
    else:
        return (tl.where(condition, other[0], x[0]), tl.where(condition, other[1], x[1]))


@triton.jit
def _bounded_kernel(
    scale_ptr, shift_ptr, low_ptr, high_ptr, start_ptr, h_ptr, lanes, steps, scale_time, scale_lane, shift_time,
    shift_lane, low_time, low_lane, high_time, high_lane, start_lane,
    SCALED: tl.constexpr, LIMITED: tl.constexpr, SMOOTH: tl.constexpr, AHEAD: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of lanes,). What is not a number stays so, as with PyTorch's maximum."""
    lane = (tl.program_id(0) * LANES + tl.arange(0, LANES)).to(tl.int64)
    mask = lane < lanes
    kind: tl.constexpr = h_ptr.dtype.element_ty
    last = tl.load(start_ptr + lane * start_lane, mask=mask, other=0.0)
    for first in range(0, steps, AHEAD):
        factors = ()
        moves = ()
        lows = ()
        highs = ()
        for k in tl.static_range(AHEAD):
            t, live = _place(lane, first + k, steps, False), mask & (_place(lane, first + k, steps, False) < steps)
            if SCALED:
                factors = factors + (tl.load(scale_ptr + t * scale_time + lane * scale_lane, mask=live, other=0.0),)
            moves = moves + (tl.load(shift_ptr + t * shift_time + lane * shift_lane, mask=live, other=0.0),)
            lows = lows + (tl.load(low_ptr + t * low_time + lane * low_lane, mask=live, other=0.0),)
            if LIMITED:
                highs = highs + (tl.load(high_ptr + t * high_time + lane * high_lane, mask=live, other=0.0),)
        for k in tl.static_range(AHEAD):
            if SCALED:
                last = last * factors[k]
            a, b = (last + moves[k]).to(kind), lows[k]
            last = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL).to(kind)
            if SMOOTH:  # in double precision, which needs no log1p
                share = tl.log(1.0 + tl.exp(-tl.abs(a - b).to(tl.float64)))
                last = tl.where(tl.abs(last) == float("inf"), last, (last.to(tl.float64) + share).to(kind))
            if LIMITED:
                last = tl.minimum(last, highs[k], propagate_nan=tl.PropagateNan.ALL).to(kind)
            place = h_ptr + _place(lane, first + k, steps, False) * lanes + lane
            tl.store(place, last, mask=mask & (_place(lane, first + k, steps, False) < steps))
