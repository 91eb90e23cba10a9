"""Linear recurrences of a few coupled values, and of complex ones, as one operation.

``h[t] = A[t] h[t-1] + b[t]`` with small matrices A is a scan: two steps compose to ``(A2 A1, A2 b1 + b2)``. Steps are
composed in pairs, which leaves the same problem of half the length. Its states are every second state of the original,
and the others are one step away (cyclic reduction, Blelloch 1990, CMU-CS-90-190). That takes log2 of the length in
passes, and about as much work as the steps themselves.

Products of matrices lose digits that one step after the other keeps, so single precision is computed in double. On the
CPU with Numba (`refold.compiler.recurrence.sweeps`) and on GPUs with Triton (`sweeps_gpu`), one step is taken after the
other, in one pass over memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ...ops.torch.nodes import define, differentiate, refuse_derivative

PAIRED = 4
"""Coupled values of one system, if steps are composed: a product of two matrices of 4 rows has 64 terms."""

_WIDE = {torch.float32: torch.float64, torch.complex64: torch.complex128}


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a system is computed: single precision for 16-bit types, double for single."""
    return _WIDE.get(dtype, torch.promote_types(dtype, torch.float32))


def _sweeps(x: Tensor) -> Any:
    """Return the module that takes one step after the other, if it can: on the CPU with Numba, on a GPU with Triton."""
    name = {"cpu": "sweeps", "cuda": "sweeps_gpu"}.get(x.device.type)
    return None if name is None else _imported(name)


@cache
def _imported(name: str) -> Any:
    try:
        return import_module(f"{__package__}.{name}")
    except ImportError:
        return None


def largest(x: Tensor) -> int:
    """Return how many values like this one may be coupled in a system."""
    sweeps = _sweeps(x)
    most: int = PAIRED if sweeps is None else sweeps.MOST
    return most


def linear_system(A: Tensor, b: Tensor, initial: Tensor | None, reverse: bool) -> Tensor:
    """Return all states of ``h[t] = A[t] h[t-1] + b[t]``.

    Args:
        A: ``(m, m, t, ...)``, or with axes of size one where all steps or elements of a state have the same; real or
            complex, as the others.
        b: ``(m, t, ...)``.
        initial: The state before the first step, ``(m, ...)``; None for nothing, which no infinity makes NaN of.
        reverse: Whether the last step comes first.

    Returns:
        ``(m, t, ...)``, contiguous, of b's dtype; computed in a wider one.
    """
    dtype = wide(b.dtype)
    if b.numel() and (sweeps := _sweeps(b)) is not None:
        narrow = b.dtype if b.dtype in _WIDE or dtype == b.dtype else dtype
        operands = (x if x is None or x.dtype == narrow else x.to(narrow) for x in (A, b, initial))
        h: Tensor = sweeps.system(*operands, reverse, dtype)
        return h if h.dtype == b.dtype else h.to(b.dtype)
    matrices, inputs = (x.to(dtype).flip(1 - b.dim()) if reverse else x.to(dtype) for x in (A, b))
    matrices, inputs = matrices.movedim((0, 1), (-2, -1)), inputs.movedim(0, -1)
    if initial is not None:
        first = inputs[:1] + _apply(matrices[:1], initial.to(dtype).movedim(0, -1)[None])
        inputs = torch.cat([first, inputs[1:]])
    h = _solve(matrices, inputs).movedim(-1, 0)
    h = h.flip(1) if reverse else h
    return torch.empty_like(b, memory_format=torch.contiguous_format).copy_(h)


def _apply(A: Tensor, x: Tensor) -> Tensor:
    """Multiply matrices (..., n, n) and vectors (..., n)."""
    return A[..., 0] * x if A.shape[-1] == 1 else (A * x.unsqueeze(-2)).sum(-1)


def _solve(A: Tensor, b: Tensor, apply: Callable[[Tensor, Tensor], Tensor] = _apply) -> Tensor:
    """Return all states (t, ..., n) from zero. A is (t or 1, ..., n, n); its first matrix counts for nothing."""
    count = b.shape[0]
    if count == 1:
        return b
    steady = A.shape[0] == 1
    odd = A if steady else A[1::2]
    before = A if steady else A[: count - 1 : 2]
    pairs = _solve(_product(odd, before), apply(odd, b[: count - 1 : 2]) + b[1::2], apply)
    h = torch.empty_like(b, memory_format=torch.contiguous_format)
    h[1::2], h[:1] = pairs, b[:1]
    if count > 2:
        h[2::2] = apply(A if steady else A[2::2], pairs[: (count - 1) // 2]) + b[2::2]
    return h


def _product(A: Tensor, B: Tensor) -> Tensor:
    """Multiply matrices (..., n, n); elementwise, as a library's products of tiny matrices are slow."""
    return A * B if A.shape[-1] == 1 else (A.unsqueeze(-1) * B.unsqueeze(-3)).sum(-2)


def _like_second(A: Tensor, b: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(b, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    A, _, initial, ctx.reverse = inputs
    ctx.save_for_backward(A, initial, output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Adjoints λ[t] = dh[t] + A[t+1]ᴴ λ[t+1] are the same kind of system against time; A's gradient is λ[t] h[t-1]ᴴ."""
    A, initial, h = ctx.saved_tensors
    adjoint = A.transpose(0, 1).conj().resolve_conj()
    # Not by ``roll``: Inductor leaves that of complex values to an indexing, of which it expects wrong strides.
    cut = -1 if ctx.reverse else 1
    later = adjoint if A.shape[2] == 1 else torch.cat([adjoint[:, :, cut:], adjoint[:, :, :cut]], 2)
    lam = LINEAR_SYSTEM(later, grad, None, not ctx.reverse)
    start = torch.zeros_like(h[:, :1]) if initial is None else initial[:, None]
    before = torch.cat([h[:, 1:], start] if ctx.reverse else [start, h[:, :-1]], 1)
    outer = lam.unsqueeze(1) * before.unsqueeze(0).conj()
    dA = outer.sum_to_size(A.shape)
    if initial is None:
        return dA, lam, None, None
    edge = -1 if ctx.reverse else 0
    return dA, lam, (adjoint[:, :, edge] * lam[:, edge]).sum(1), None


LINEAR_SYSTEM = define(
    "linear_system", "(Tensor A, Tensor b, Tensor? initial, bool reverse) -> Tensor", linear_system, _like_second
)
differentiate("linear_system", _backward, _save)


# Maxima -------------------------------------------------------------------------------------------


def max_plus_scan(shift: Tensor, floor: Tensor, initial: Tensor, smooth: bool, tie: float = 0.5) -> Tensor:
    """Return all states of ``h[t] = max(h[t-1] + shift[t], floor[t])``.

    That is a linear recurrence whose sum is a maximum and whose product is a sum: the running maximum that keeps
    exponential gates finite.

    Args:
        shift: ``(t, ...)``, or ``(1, ...)`` if all steps have the same.
        floor: The same; one of the two has all steps.
        initial: The state before the first step, ``(...)``.
        smooth: Whether ``logaddexp`` takes the place of the maximum.
        tie: Which share of a gradient the state before gets where both sides are equal.

    Returns:
        ``(t, ...)``, contiguous.
    """
    if floor.numel() and (sweeps := _sweeps(floor)) is not None:
        return sweeps.maxima(shift, floor, initial, smooth)
    floor = floor.expand(max(len(shift), len(floor)), *floor.shape[1:])
    above = torch.logaddexp if smooth else torch.maximum
    first = above(initial[None] + shift[:1], floor[:1])

    def solve(shift: Tensor, floor: Tensor) -> Tensor:
        count = floor.shape[0]
        if count == 1:
            return floor
        steady = shift.shape[0] == 1
        odd, before = (shift, shift) if steady else (shift[1::2], shift[: count - 1 : 2])
        pairs = solve(odd + before, above(floor[: count - 1 : 2] + odd, floor[1::2]))
        h = torch.empty_like(floor, memory_format=torch.contiguous_format)
        h[1::2], h[:1] = pairs, floor[:1]
        if count > 2:
            h[2::2] = above(pairs[: (count - 1) // 2] + (shift if steady else shift[2::2]), floor[2::2])
        return h

    return solve(shift, torch.cat([first, floor[1:]])).contiguous()


def all_steps(shift: Tensor, floor: Tensor, *rest: Any) -> Tensor:
    """Return memory for all states of a running maximum."""
    whole = floor if shift.shape[0] == 1 else shift
    return torch.empty_like(whole, memory_format=torch.contiguous_format)


def _save_maxima(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    shift, floor, initial, ctx.smooth, ctx.tie = inputs
    ctx.save_for_backward(shift, floor, initial, output)


def _maxima_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Hand on the share of a state's gradient that the carried side had in it: all, what a tie leaves it, or none."""
    shift, floor, initial, h = ctx.saved_tensors
    carried = torch.cat([initial[None], h[:-1]]) + shift
    if ctx.smooth:
        share = torch.exp(carried - h)
    else:
        share = (carried > floor).to(h.dtype) + ctx.tie * (carried == floor).to(h.dtype)
    share = torch.where(torch.isneginf(h), 0.0, share) if ctx.smooth else share
    lam = MAX_PLUS_ADJOINT(share, grad)
    carried_grad = _kept(share, lam)
    dshift, dfloor = (
        grad.sum(0, keepdim=True) if operand.shape[0] == 1 else grad
        for operand, grad in ((shift, carried_grad), (floor, _kept(1 - share, lam)))
    )
    return dshift, dfloor, carried_grad[0], None, None


def _handed_back(share: Tensor, grad: Tensor) -> Tensor:
    """Return ``lam[t] = grad[t] + share[t + 1] lam[t + 1]``, all (t, ...)."""
    if grad.numel() and (sweeps := _sweeps(grad)) is not None:
        return sweeps.handed_back(share, grad)
    later = share.roll(-1, 0).flip(0)[..., None, None]
    lam = _solve(later, grad.flip(0)[..., None], lambda A, x: _kept(A[..., 0], x))
    return lam[..., 0].flip(0).contiguous()


def _kept(share: Tensor, x: Tensor) -> Tensor:
    """Multiply by a share of which zero reads nothing, as autograd's maximum does: not even what is not finite."""
    return torch.where(share == 0, 0.0, share * x)


MAX_PLUS_SCAN = define(
    "max_plus_scan",
    "(Tensor shift, Tensor floor, Tensor initial, bool smooth, float tie=0.5) -> Tensor",
    max_plus_scan,
    all_steps,
)
differentiate("max_plus_scan", _maxima_backward, _save_maxima)
MAX_PLUS_ADJOINT = define("max_plus_adjoint", "(Tensor share, Tensor grad) -> Tensor", _handed_back, _like_second)
refuse_derivative("max_plus_adjoint")
