"""The elementwise recurrence on torch: one `addcmul` per token for large states, two levels of them for small states.

With a small state, one call per token would be nothing but overhead. Then time is folded into lanes of √t tokens that
advance together. One more pass carries states from lane to lane, and adds their contributions. Factors are multiplied,
never divided, so signs and zeros are no special cases.

The contribution of a sequence's initial state is added to its first input. At that token, the loops do not read the
state of the sequence before it, because zero times a state that is not finite would be NaN. Offsets are read on the
host: on an accelerator, that is one synchronisation per call.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from refold.ops.torch.chunks import read_offsets
from refold.ops.torch.nodes import exporting_to_onnx
from refold.ops.torch.pointwise import accumulator

LARGE_STATE = 4096
"""Elements of a state from which a call per token has enough to do."""


def linear_scan(
    *, a: Tensor, x: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, reset: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `refold.ops.linear_scan`."""
    borders = _Borders(x, cu_seqlens, reverse, reset)
    dtype = accumulator(x.dtype)
    factors, h = (_ordered(array, reverse, dtype) for array in (a, x))
    borders.enter(factors, h, initial_state)
    _scan(factors, h, borders.cuts, borders.reset)
    state = borders.final(h, initial_state)
    return _ordered(h, reverse, x.dtype).contiguous(), state


def linear_scan_backward(
    *, dh: Tensor | None, dstate: Tensor | None, needs: frozenset[str], a: Tensor, x: Tensor,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, reset: Tensor | None, reverse: bool,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the gradients of all floating-point arguments that are present, whatever ``needs`` says."""
    borders = _Borders(x, cu_seqlens, reverse, reset)
    dtype, reset = accumulator(x.dtype), borders.reset
    factors, h = (_ordered(array, reverse, dtype) for array in (a, x))
    borders.enter(factors, h, initial_state)
    _scan(factors, h, borders.cuts, reset)

    # Adjoints λ[t] = dh[t] + a[t+1] λ[t+1]: the same recurrence against time, with factors one token later.
    adjoints = torch.zeros_like(h) if dh is None else _ordered(dh, reverse, dtype)
    borders.add_final_gradient(adjoints, dstate)
    later = torch.cat([factors[:, 1:], torch.zeros_like(factors[:, :1])], 1)
    ends = None if reset is None else torch.cat([reset[:, 1:], torch.zeros_like(reset[:, :1])], 1).flip(1)
    against = adjoints.flip(1)
    _scan(later.flip(1), against, [x.shape[1] - cut for cut in borders.cuts], ends)
    adjoints = against.flip(1)

    before = torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], 1)
    dinitial = borders.leave(before, factors, adjoints, initial_state, dstate)
    da = before.mul_(adjoints) if reset is None else before.mul_(adjoints).masked_fill_(reset, 0.0)
    grads = {"a": _ordered(da, reverse, dtype), "x": _ordered(adjoints, reverse, dtype)}
    return grads if initial_state is None else {**grads, "initial_state": dinitial}


def fading(tokens: int, *, a: Tensor, reset: Tensor | None, **others: Any) -> Tensor | None:
    """Return the log of what each of the first tokens leaves of a state; 0 where a later one could bring it back.

    None with resets: behind one, a state is finite that was not.
    """
    return None if reset is not None else torch.where(a.abs().amax() <= 1, a[:, :tokens].abs().log(), 0.0)


def _ordered(array: Tensor, reverse: bool, dtype: torch.dtype) -> Tensor:
    """Return a copy whose axis 1 runs in the direction of the scan."""
    return (array.flip(1) if reverse else array).to(dtype, copy=not reverse)


def _scan(factors: Tensor, h: Tensor, cuts: list[int], reset: Tensor | None) -> None:
    """Turn inputs into states in place.

    The factors of the first token, of those in ``cuts``, and of what ``reset`` marks, count for nothing. What is reset
    is read as zero, with a factor of zero.
    """
    batch, seqlen = h.shape[:2]
    elements = h[:, 0].numel()
    factors = factors if reset is None else factors.masked_fill(reset, 0.0)
    if elements >= LARGE_STATE or seqlen < 16 or exporting_to_onnx():  # which has no cumulative product
        steps, decays, first = h.unbind(1), factors.unbind(1), set(cuts)
        for t in range(1, seqlen):
            if t not in first:
                before = steps[t - 1] if reset is None else steps[t - 1].masked_fill(reset[:, t], 0.0)
                steps[t].addcmul_(decays[t], before)
        return
    length = math.isqrt(seqlen - 1) + 1
    nlanes = -(-seqlen // length)
    padded_factors, padded = (array.new_zeros(batch, nlanes * length, *array.shape[2:]) for array in (factors, h))
    padded_factors[:, :seqlen], padded[:, :seqlen] = factors, h
    lanes, lane_factors = padded.unflatten(1, (nlanes, length)), padded_factors.unflatten(1, (nlanes, length))
    at = set(cuts)
    marked = [t in at for t in range(nlanes * length)]
    # At which tokens of a lane, and of which lanes, something is cut or reset.
    some = [reset is not None or any(marked[t::length]) for t in range(length)]
    ending = [any(marked[lane * length :][:length]) for lane in range(nlanes)]
    cut = torch.tensor(marked, device=h.device).view(nlanes, length, *(1 for _ in h.shape[2:]))
    if reset is not None:
        marks = reset.new_zeros(batch, nlanes * length, *reset.shape[2:])
        marks[:, :seqlen] = reset
        cut = cut | marks.unflatten(1, (nlanes, length))
    else:
        cut = cut[None]
    steps, decays = lanes.unbind(2), lane_factors.unbind(2)
    for t in range(1, length):
        before = steps[t - 1].masked_fill(cut[:, :, t], 0.0) if some[t] else steps[t - 1]
        steps[t].addcmul_(decays[t].masked_fill(cut[:, :, t], 0.0) if some[t] else decays[t], before)
    reach = lane_factors.cumprod(2)  # what is left in a lane of the state that enters it
    if cuts or reset is not None:
        closed = cut.cummax(2).values  # whether what enters the lane ended before this token
        reach.masked_fill_(closed, 0.0)
    ends = lanes[:, :, -1].clone()
    for lane in range(1, nlanes):
        if not ending[lane]:
            before = ends[:, lane - 1]
            before = before if reset is None else before.masked_fill(closed[:, lane, -1], 0.0)
            ends[:, lane].addcmul_(reach[:, lane, -1], before)
    if cuts or reset is not None:
        lanes[:, 1:] += (reach[:, 1:] * ends[:, :-1, None]).masked_fill_(closed[:, 1:], 0.0)
    else:
        lanes[:, 1:].addcmul_(reach[:, 1:], ends[:, :-1, None])
    h.copy_(padded[:, :seqlen])


class _Borders:
    """Where sequences begin and end, and states are reset, in the direction of the scan; empty ones have no border."""

    def __init__(self, x: Tensor, cu_seqlens: Tensor | None, reverse: bool, reset: Tensor | None) -> None:
        batch, seqlen = x.shape[:2]
        self.reset = reset.flip(1) if reverse and reset is not None else reset
        self.shape = (batch, *x.shape[2:])
        every = torch.arange(batch, device=x.device)
        # Batch rows, first tokens, last tokens, sequences.
        self.row, self.sequence = every, every
        self.first, self.last = torch.zeros_like(every), torch.full_like(every, seqlen - 1)
        self.cuts: list[int] = []
        """First tokens of all sequences of a pack but the first."""
        if cu_seqlens is not None:
            offsets = read_offsets("linear_scan", cu_seqlens, seqlen)
            pairs = [(k, s, e - 1) for k, (s, e) in enumerate(pairwise(offsets)) if e > s]
            sequence, first, last = torch.tensor(pairs, device=x.device).unbind(1)
            self.shape = (len(offsets) - 1, *x.shape[2:])
            self.row, self.sequence = torch.zeros_like(sequence), sequence
            self.first, self.last = (seqlen - 1 - last, seqlen - 1 - first) if reverse else (first, last)
            self.cuts = [seqlen - 1 - end if reverse else start for _, start, end in pairs]
            self.cuts.remove(0)

    def enter(self, factors: Tensor, h: Tensor, initial: Tensor | None) -> None:
        """Let each sequence start from its initial state."""
        at = (self.row, self.first)
        before = torch.zeros_like(h[at]) if initial is None else initial.to(h.dtype)[self.sequence]
        kept = factors[at] * before
        h[at] += kept if self.reset is None else kept.masked_fill(self.reset[at], 0.0)

    def final(self, h: Tensor, initial: Tensor | None) -> Tensor:
        """Return the last state of each sequence."""
        state = h.new_zeros(self.shape) if initial is None else initial.to(h.dtype, copy=True)
        state[self.sequence] = h[self.row, self.last]
        return state.contiguous()

    def add_final_gradient(self, adjoints: Tensor, dstate: Tensor | None) -> None:
        """Let the gradient of each final state enter at the last token."""
        if dstate is not None:
            adjoints[self.row, self.last] += dstate.to(adjoints.dtype)[self.sequence]

    def leave(
        self, before: Tensor, factors: Tensor, adjoints: Tensor, initial: Tensor | None, dstate: Tensor | None
    ) -> Tensor:
        """Put initial states where sequences begin in ``before``; return the gradients of these states."""
        at = (self.row, self.first)
        before[at] = 0.0 if initial is None else initial.to(before.dtype)[self.sequence]
        dinitial = before.new_zeros(self.shape) if dstate is None else dstate.to(before.dtype, copy=True)
        entering = factors[at] * adjoints[at]
        dinitial[self.sequence] = entering if self.reset is None else entering.masked_fill(self.reset[at], 0.0)
        return dinitial
