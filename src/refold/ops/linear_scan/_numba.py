"""The elementwise recurrence on the CPU in one sweep over memory: compiled by Numba, the state in cache.

It reads a and x once and writes h once, which is the least. The torch backend also copies what it then updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from refold.ops.linear_scan.spec import SPEC
from refold.ops.numba.blocks import ArgumentPlace, share_out, spans_of, supports, zeros_or_copy
from refold.ops.numba.kernel import Kernel, kernel
from refold.ops.torch.plans import planned

__all__ = ["linear_scan", "supports"]

CHANNELS = 512
"""Elements of the state in a block: long enough for whole pages to be read in turn."""
_NOTHING = np.zeros((1, 1, 1), np.bool_)  # no tensor: a module that is imported while PyTorch traces makes fake ones


@planned(SPEC)
def linear_scan(
    *, a: Tensor, x: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, reset: Tensor | None,
    reverse: bool,
) -> Callable[..., tuple[Tensor, Tensor]]:  # fmt: skip
    """Plan `refold.ops.linear_scan`."""
    cut = _cut(_sweep, x, cu_seqlens, reset, reverse, 1)

    def run(
        a: Tensor, x: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, reset: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        sequences, sweep = cut(cu_seqlens)
        state = zeros_or_copy(initial_state, sequences, *x.shape[2:])
        h = torch.empty(x.shape, dtype=torch.float32)
        sweep(*_marks(reset), _single(a), _single(x), h, state)
        return h if x.dtype is torch.float32 else h.to(x.dtype), state

    return run


@planned(SPEC, backward=True)
def linear_scan_backward(
    *, dh: Tensor | None, dstate: Tensor | None, needs: frozenset[str], a: Tensor, x: Tensor,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, reset: Tensor | None, reverse: bool,
) -> Callable[..., dict[str, Tensor]]:  # fmt: skip
    """Plan the gradients of all floating-point arguments that are present, whatever ``needs`` says.

    With adjoints λ[t] = dh[t] + a[t+1] λ[t+1], x's gradient is λ and a's λ[t] h[t-1]: one sweep against the scan.
    Neither passes a reset.
    """
    given = {"initial_state": initial_state, "cu_seqlens": cu_seqlens, "reset": reset, "reverse": reverse}
    forward = linear_scan.plan(a=a, x=x.float(), **given)
    cut = _cut(_sweep_back, x, cu_seqlens, reset, reverse, 2)

    def run(
        dh: Tensor | None, dstate: Tensor | None, a: Tensor, x: Tensor, initial_state: Tensor | None,
        cu_seqlens: Tensor | None, reset: Tensor | None,
    ) -> dict[str, Tensor]:  # fmt: skip
        sequences, sweep = cut(cu_seqlens)
        h, _ = forward(a, x.float(), initial_state, cu_seqlens, reset)
        adjoints = torch.zeros_like(h) if dh is None else torch.empty_like(h).copy_(dh)
        before, dinitial = (zeros_or_copy(state, sequences, *x.shape[2:]) for state in (initial_state, dstate))
        # λ h[t-1] takes the place of h, as nothing reads a state after its adjoint.
        sweep(*_marks(reset), _single(a), h, adjoints, before, dinitial)
        grads = {"a": h, "x": adjoints}
        return grads if initial_state is None else {**grads, "initial_state": dinitial}

    return run


def _cut(
    kernel: Kernel, x: Tensor, cu_seqlens: Tensor | None, reset: Tensor | None, reverse: bool, states: int
) -> Callable[[Tensor | None], tuple[int, Callable[..., None]]]:
    """Make a function of the offsets of sequences: their number, and the sweep over them."""
    batch, seqlen, *rest = x.shape
    elements = math.prod(rest)
    flat = ArgumentPlace(torch.float32, (batch, seqlen, elements))
    marks = _NOTHING if reset is None else ArgumentPlace(torch.bool, flat.shape)

    def cut(offsets: Tensor | None) -> tuple[int, Callable[..., None]]:
        spans = spans_of("linear_scan", batch, seqlen, offsets)
        given = (marks, reverse, flat, flat, flat, *[ArgumentPlace(torch.float32, (len(spans), elements))] * states)
        return len(spans), share_out(kernel, given, spans, (0, elements), CHANNELS, math.prod(flat.shape))

    if cu_seqlens is not None:  # values, which a signature does not hold
        return cut
    whole = cut(None)
    return lambda _: whole


def _single(array: Tensor) -> Tensor:
    """Return a tensor as a contiguous one of float32."""
    # A short scan takes a few microseconds, and an operation of PyTorch that changes nothing one of them.
    array = array if array.dtype is torch.float32 else array.float()
    return array if array.is_contiguous() else array.contiguous()


def _marks(reset: Tensor | None) -> tuple[Tensor, ...]:
    return () if reset is None else (reset if reset.is_contiguous() else reset.contiguous(),)


@kernel(fastmath={"contract"})
def _sweep(reset: Any, reverse: Any, a: Any, x: Any, h: Any, state: Any, blocks: Any) -> None:
    """Scan sequences over ranges of channels; overwrites ``state`` (k, elements)."""
    some = reset.size > 1 or reset[0, 0, 0]
    for row, start, stop, k, low, high in blocks:
        width, last = high - low, state[k, low:high]
        for i in range(start, stop):
            t = start + stop - 1 - i if reverse else i
            # Slices, because an index that might count from the end keeps a loop from being vectorised.
            factors, inputs, states = a[row, t, low:high], x[row, t, low:high], h[row, t, low:high]
            if some:
                marks = reset[row, t, low:high]
                for c in range(width):
                    last[c] = (np.float32(0.0) if marks[c] else factors[c] * last[c]) + inputs[c]
                    states[c] = last[c]
            else:
                for c in range(width):
                    last[c] = factors[c] * last[c] + inputs[c]
                    states[c] = last[c]


@kernel(fastmath={"contract"})
def _sweep_back(reset: Any, reverse: Any, a: Any, h: Any, adjoints: Any, before: Any, carry: Any, blocks: Any) -> None:
    """Turn results' gradients into adjoints, states into a's gradients, and last states' gradients into first ones'."""
    some = reset.size > 1 or reset[0, 0, 0]
    for row, start, stop, k, low, high in blocks:
        width, last = high - low, carry[k, low:high]
        for i in range(start, stop):
            t = i if reverse else start + stop - 1 - i
            factors, grads, states = a[row, t, low:high], adjoints[row, t, low:high], h[row, t, low:high]
            earlier = before[k, low:high] if i == stop - 1 else h[row, t + 1 if reverse else t - 1, low:high]
            for c in range(width):
                adjoint = grads[c] + last[c]
                grads[c] = adjoint
                states[c] = adjoint * earlier[c]
                last[c] = factors[c] * adjoint
            if some:
                marks = reset[row, t, low:high]
                for c in range(width):
                    states[c] = np.float32(0.0) if marks[c] else states[c]
                    last[c] = np.float32(0.0) if marks[c] else last[c]
