"""The elementwise recurrence on the CPU in one sweep over memory: compiled by Numba, the state in cache.

It reads a and x once and writes h once, which is the least. The torch backend also copies what it then updates.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from refold.ops.numba.blocks import share_out, spans_of, supports, zeros_or_copy
from refold.ops.numba.kernel import kernel

__all__ = ["linear_scan", "supports"]

CHANNELS = 512
"""Elements of the state in a block: long enough for whole pages to be read in turn."""
_NOTHING = np.zeros((1, 1, 1), np.bool_)  # no tensor: a module that is imported while PyTorch traces makes fake ones


def linear_scan(
    *, a: Tensor, x: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, reset: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `refold.ops.linear_scan`."""
    batch, seqlen, *rest = x.shape
    spans = spans_of("linear_scan", batch, seqlen, cu_seqlens)
    factors, inputs = _flat(a), _flat(x)
    state = zeros_or_copy(initial_state, len(spans), *rest)
    h = torch.empty_like(inputs)
    elements = inputs.shape[2]
    states = state if len(rest) == 1 else state.view(len(spans), elements)
    arrays = (factors, inputs, _marks(reset, x), h, states, reverse)
    share_out(_sweep, arrays, spans, (0, elements), CHANNELS, inputs.numel())
    h = h if len(rest) == 1 else h.view(x.shape)
    return h if x.dtype is torch.float32 else h.to(x.dtype), state


def linear_scan_backward(
    *, dh: Tensor | None, dstate: Tensor | None, needs: frozenset[str], a: Tensor, x: Tensor,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, reset: Tensor | None, reverse: bool,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the gradients of all floating-point arguments that are present, whatever ``needs`` says.

    With adjoints λ[t] = dh[t] + a[t+1] λ[t+1], x's gradient is λ and a's λ[t] h[t-1]: one sweep against the scan.
    Neither passes a reset.
    """
    batch, seqlen, *rest = x.shape
    spans = spans_of("linear_scan", batch, seqlen, cu_seqlens)
    given = {"initial_state": initial_state, "cu_seqlens": cu_seqlens, "reset": reset, "reverse": reverse}
    h, _ = linear_scan(a=a, x=x.float(), **given)  # type: ignore[arg-type]
    factors, h = _flat(a), _flat(h)
    adjoints = torch.zeros_like(h) if dh is None else _flat(dh).clone()
    before = zeros_or_copy(initial_state, len(spans), *rest)
    dinitial = zeros_or_copy(dstate, len(spans), *rest)
    elements = h.shape[2]
    states = (array.view(len(spans), elements) for array in (before, dinitial))
    # λ h[t-1] takes the place of h, as nothing reads a state after its adjoint.
    arrays = (factors, _marks(reset, x), h, adjoints, *states, reverse)
    share_out(_sweep_back, arrays, spans, (0, elements), CHANNELS, h.numel())
    grads = {"a": h.view(x.shape), "x": adjoints.view(x.shape)}
    return grads if initial_state is None else {**grads, "initial_state": dinitial}


def _flat(array: Tensor) -> Tensor:
    """Return a tensor as float32 (batch, time, elements)."""
    # A short scan takes a few microseconds, and an operation of PyTorch that changes nothing one of them.
    array = array if array.dtype is torch.float32 else array.float()
    array = array if array.is_contiguous() else array.contiguous()
    return array if array.dim() == 3 else array.view(*array.shape[:2], -1)


def _marks(reset: Tensor | None, x: Tensor) -> Any:
    """Return what is reset as (batch, time, elements), one element at most if nothing is."""
    if reset is None:
        return _NOTHING
    return reset.reshape(*x.shape[:2], -1).contiguous()


@kernel(apart=True, fastmath={"contract"})
def _sweep(a: Any, x: Any, reset: Any, h: Any, state: Any, reverse: Any, blocks: Any) -> None:
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


@kernel(apart=True, fastmath={"contract"})
def _sweep_back(a: Any, reset: Any, h: Any, adjoints: Any, before: Any, carry: Any, reverse: Any, blocks: Any) -> None:
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
