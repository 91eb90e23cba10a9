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

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ...ops.torch.nodes import define, differentiate
from ..ir.operators import SCAN

PAIRED = 4
"""Coupled values of one system, if steps are composed: a product of two matrices of 4 rows has 64 terms."""

_Rule = Callable[[Tensor, Tensor], Tensor]
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


def linear_system(A: Tensor, b: Tensor, initial: Tensor | None, reverse: bool, copies: Sequence[int]) -> Tensor:
    """Return all states of ``h[t] = A[t] s[t-1] + b[t]``, where s is h and then copies of what s was a step before.

    A recurrence of a higher order keeps earlier values as copies: ``y[t] = a y[t-1] + c y[t-2] + x[t]`` has one row,
    for y, and one copy, of y. Copies are neither read from memory nor written to it.

    Args:
        A: ``(n, m, t, ...)``, n of m values being computed, or with axes of size one where all steps or elements of a
            state have the same; real or complex, as the others.
        b: ``(n, t, ...)``.
        initial: The values before the first step, ``(m, ...)``; None for nothing, which no infinity makes NaN of.
        reverse: Whether the last step comes first.
        copies: For each of the m - n other values, which one it copies: ``s[n + k][t] = s[copies[k]][t-1]``; one that
            comes before it.

    Returns:
        ``(n, t, ...)``, contiguous, of b's dtype; computed in a wider one.
    """
    dtype = wide(b.dtype)
    if b.numel() and (sweeps := _sweeps(b)) is not None:
        narrow = b.dtype if b.dtype in _WIDE or dtype == b.dtype else dtype
        operands = (x if x is None or x.dtype == narrow else x.to(narrow) for x in (A, b, initial))
        h: Tensor = sweeps.system(*operands, reverse, copies, dtype)
        return h if h.dtype == b.dtype else h.to(b.dtype)
    A, inputs = with_copies(A.to(dtype), b.to(dtype), copies)
    matrices, inputs = (x.flip(1 - b.dim()) if reverse else x for x in (A, inputs))
    matrices, inputs = matrices.movedim((0, 1), (-2, -1)), inputs.movedim(0, -1)
    if initial is not None:
        first = inputs[:1] + _apply(matrices[:1], initial.to(dtype).movedim(0, -1)[None])
        inputs = torch.cat([first, inputs[1:]])
    h = _composed(matrices, inputs).movedim(-1, 0)[: b.shape[0]]
    h = h.flip(1) if reverse else h
    return torch.empty_like(b, memory_format=torch.contiguous_format).copy_(h)


def with_copies(A: Tensor, b: Tensor, copies: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return a system that computes its copies, too: with rows of zeros and a one."""
    if not copies:
        return A, b
    rows = A.new_zeros(len(copies), *A.shape[1:])
    for k, copied in enumerate(copies):
        rows[k, copied] = 1
    return torch.cat([A, rows]), torch.cat([b, b.new_zeros(len(copies), *b.shape[1:])])


def _apply(A: Tensor, x: Tensor) -> Tensor:
    """Multiply matrices (..., n, n) and vectors (..., n)."""
    return A[..., 0] * x if A.shape[-1] == 1 else (A * x.unsqueeze(-2)).sum(-1)


def _product(A: Tensor, B: Tensor) -> Tensor:
    """Multiply matrices (..., n, n); elementwise, as a library's products of tiny matrices are slow."""
    return A * B if A.shape[-1] == 1 else (A.unsqueeze(-1) * B.unsqueeze(-3)).sum(-2)


def _composed(A: Tensor, b: Tensor, product: _Rule = _product, apply: _Rule = _apply, add: _Rule = torch.add) -> Tensor:
    """Return all states (t, ..., n) from zero, by steps composed in pairs: ``h[t] = add(apply(A[t], h[t-1]), b[t])``.

    A is (t or 1, ..., n, n), or what ``product`` and ``apply`` take in its place. Its first one counts for nothing.
    """
    count, rules = b.shape[0], (product, apply, add)
    if count == 1:
        return b
    steady = A.shape[0] == 1
    odd, before = (A, A) if steady else (A[1::2], A[: count - 1 : 2])
    pairs = _composed(product(odd, before), add(apply(odd, b[: count - 1 : 2]), b[1::2]), *rules)
    h = torch.empty_like(b, memory_format=torch.contiguous_format)
    h[1::2], h[:1] = pairs, b[:1]
    if count > 2:
        h[2::2] = add(apply(A if steady else A[2::2], pairs[: (count - 1) // 2]), b[2::2])
    return h


def _like_second(A: Tensor, b: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(b, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    A, _, initial, ctx.reverse, ctx.copies = inputs
    ctx.save_for_backward(A, initial, output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Adjoints λ[t] = dh[t] + A[t+1]ᴴ λ[t+1] are the same kind of system against time; A's gradient is λ[t] s[t-1]ᴴ."""
    A, initial, h = ctx.saved_tensors
    rows, size = A.shape[:2]
    matrices, grad = with_copies(A, grad, ctx.copies)
    adjoint = matrices.transpose(0, 1).conj().resolve_conj()
    # Not by ``roll``: Inductor leaves that of complex values to an indexing, of which it expects wrong strides.
    cut = -1 if ctx.reverse else 1
    later = adjoint if A.shape[2] == 1 else torch.cat([adjoint[:, :, cut:], adjoint[:, :, :cut]], 2)
    lam = LINEAR_SYSTEM(later, grad, None, not ctx.reverse, [])
    start = h.new_zeros(size, *h.shape[2:]) if initial is None else initial

    def before(states: Tensor, first: Tensor) -> Tensor:
        pair = [states[:, 1:], first] if ctx.reverse else [first, states[:, :-1]]
        return torch.cat(pair, 1)

    read = before(h, start[:rows, None])
    for k, copied in enumerate(ctx.copies, rows):
        read = torch.cat([read, before(read[copied : copied + 1], start[k : k + 1, None])])
    outer = lam[:rows].unsqueeze(1) * read.unsqueeze(0).conj()
    dA = outer.sum_to_size(A.shape)
    if initial is None:
        return dA, lam[:rows], None, None, None
    edge = -1 if ctx.reverse else 0
    return dA, lam[:rows], (adjoint[:, :, edge] * lam[:, edge]).sum(1), None, None


LINEAR_SYSTEM = define(
    "linear_system",
    "(Tensor A, Tensor b, Tensor? initial, bool reverse, int[] copies) -> Tensor",
    linear_system,
    _like_second,
)
differentiate("linear_system", _backward, _save)


# Bounds -------------------------------------------------------------------------------------------


def bounded_scan(
    scale: Tensor | None, shift: Tensor, low: Tensor, high: Tensor | None, initial: Tensor, smooth: bool,
    low_shares: Sequence[float], high_shares: Sequence[float],
) -> Tensor:  # fmt: skip
    """Return all states of ``h[t] = min(max(scale[t] * h[t-1] + shift[t], low[t]), high[t])``.

    Without scale and high, that is a linear recurrence whose sum is a maximum and whose product is a sum: the running
    maximum that keeps exponential gates finite. Without Numba and Triton, the steps of such a one are composed, and
    others are taken one after the other.

    Args:
        scale: ``(t, ...)``, or ``(1, ...)`` if all steps have the same; None for 1.
        shift: The same.
        low: The same; shift or low has all steps.
        high: The same as scale; None for no such bound.
        initial: The state before the first step, ``(...)``.
        smooth: Whether ``logaddexp`` takes the place of the maximum; then there is no scale and no high.
        low_shares: Which share of a gradient the state before gets where it is equal to the lower bound, and which one
            both get where one of them is not a number.
        high_shares: The same at the upper bound.

    Returns:
        ``(t, ...)``, contiguous.
    """
    if low.numel() and (sweeps := _sweeps(low)) is not None:
        h: Tensor = sweeps.bounded(scale, shift, low, high, initial, smooth)
        return h
    low = low.expand(max(len(shift), len(low)), *low.shape[1:])
    if scale is None and high is None:
        return _maxima(shift, low, initial, smooth)
    factors, tops = (x if x is None else x.expand(low.shape) for x in (scale, high))
    out = [initial]
    for t, (move, floor) in enumerate(zip(shift.expand(low.shape), low, strict=True)):
        x = torch.maximum((out[-1] if factors is None else factors[t] * out[-1]) + move, floor)
        out.append(x if tops is None else torch.minimum(x, tops[t]))
    return torch.stack(out[1:])


def _maxima(shift: Tensor, floor: Tensor, initial: Tensor, smooth: bool) -> Tensor:
    """Compose the steps of a running maximum."""
    above = torch.logaddexp if smooth else torch.maximum
    first = above(initial[None] + shift[:1], floor[:1])
    return _composed(shift, torch.cat([first, floor[1:]]), torch.add, torch.add, above).contiguous()


def all_steps(scale: Tensor | None, shift: Tensor, low: Tensor, *rest: Any) -> Tensor:
    """Return memory for all states within bounds."""
    whole = low if shift.shape[0] == 1 else shift
    return torch.empty_like(whole, memory_format=torch.contiguous_format)


def _save_bounded(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *operands, ctx.smooth, ctx.low_shares, ctx.high_shares = inputs
    ctx.save_for_backward(*operands, output)


def _bounded_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Hand on the share of a state's gradient that the carried side had in it: all, what a tie leaves it, or none.

    Of ``lam[t] = grad[t] + factor[t + 1] lam[t + 1]``, a factor of zero is a reset: it reads nothing.
    """
    scale, shift, low, high, initial, h = ctx.saved_tensors
    before = torch.cat([initial[None], h[:-1]])
    carried = (before if scale is None else scale * before) + shift
    if ctx.smooth:
        share = torch.where(torch.isneginf(h), 0.0, torch.sigmoid(carried - low))
        shares = [share, 1 - share]
    else:
        shares = _shared(carried, low, ctx.low_shares)
    if high is not None:
        below, top = _shared(-torch.maximum(carried, low), -high, ctx.high_shares)
        shares = [below * shares[0], below * shares[1], top]
    factor = shares[0] if scale is None else _kept(shares[0], scale)
    later = torch.cat([factor[1:], torch.zeros_like(factor[:1])])[None]
    lam = SCAN.target(*SCAN.args(a=later, x=grad[None], reset=later == 0, reverse=True))[0][0]
    moved, *held = (_kept(share, lam) for share in shares)
    found = [None if scale is None else _kept(moved, before), moved, held[0], None if high is None else held[1]]
    own = [
        x if x is None or operand.shape[0] > 1 else x.sum(0, keepdim=True)
        for x, operand in zip(found, (scale, shift, low, high), strict=True)
    ]
    return *own, _kept(factor[0], lam[0]), None, None, None


def _shared(x: Tensor, bound: Tensor, shares: Sequence[float]) -> list[Tensor]:
    """Return the shares of a gradient that the two operands of a maximum get."""
    tie, unknown = shares
    equal = (x == bound).to(x.dtype)
    # What is not a number is neither above nor below, and not the contrary either.
    above, below = (~(x <= bound), ~(x >= bound)) if unknown else (x > bound, x < bound)
    return [above.to(x.dtype) + tie * equal, below.to(x.dtype) + (1 - tie) * equal]


def _kept(share: Tensor, x: Tensor) -> Tensor:
    """Multiply by a share of which zero reads nothing, as autograd's maximum does: not even what is not finite."""
    return torch.where(share == 0, 0.0, share * x)


BOUNDED_SCAN = define(
    "bounded_scan",
    "(Tensor? scale, Tensor shift, Tensor low, Tensor? high, Tensor initial, bool smooth, float[] low_shares, "
    "float[] high_shares) -> Tensor",
    bounded_scan,
    all_steps,
)
differentiate("bounded_scan", _bounded_backward, _save_bounded)
