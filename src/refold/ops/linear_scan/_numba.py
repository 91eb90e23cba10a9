"""The elementwise recurrence on the CPU in one sweep over memory: compiled by Numba, the state in cache.

It reads a and x once and writes h once, which is the least. The torch backend also copies what it then updates.

A short scan takes a few microseconds, as long as a few operations of PyTorch. So arrays are shaped and filled with NumPy.
Kernels take arrays of one axis and unsigned positions: a slice for each step counts references, which takes longer than
a row of 64 elements, and an index that might count from the end keeps a loop from being vectorised.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from refold.ops.numba.blocks import share_out, spans_of, supports
from refold.ops.numba.kernel import kernel

__all__ = ["linear_scan", "supports"]

CHANNELS = 512
"""Elements of the state in a block: long enough for whole pages to be read in turn."""
_NOTHING = np.zeros(0, np.bool_)  # no tensor: a module that is imported while PyTorch traces makes fake ones


def linear_scan(
    *, a: Tensor, x: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, reset: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `refold.ops.linear_scan`."""
    batch, seqlen, *rest = x.shape
    spans = spans_of("linear_scan", batch, seqlen, cu_seqlens)
    h = torch.empty(x.shape, dtype=torch.float32)
    state = torch.empty((len(spans), *rest), dtype=torch.float32)
    states, elements = state.numpy().reshape(-1), state.numel() // len(spans)
    states[:] = 0 if initial_state is None else _flat(initial_state)
    arrays = (_flat(a), _flat(x), _marks(reset), h.numpy().reshape(-1), states, reverse, seqlen, elements)
    share_out(_sweep, arrays, spans, (0, elements), CHANNELS, x.numel())
    return h if h.dtype is x.dtype else h.to(x.dtype), state


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
    adjoints, dinitial = torch.empty_like(h), torch.empty((len(spans), *rest), dtype=torch.float32)
    adjoints.numpy().reshape(-1)[:] = 0 if dh is None else _flat(dh)
    carry, elements = dinitial.numpy().reshape(-1), dinitial.numel() // len(spans)
    carry[:] = 0 if dstate is None else _flat(dstate)
    before = np.zeros_like(carry) if initial_state is None else _flat(initial_state)
    # λ h[t-1] takes the place of h, as nothing reads a state after its adjoint.
    flat = (_flat(a), _marks(reset), h.numpy().reshape(-1), adjoints.numpy().reshape(-1), before, carry)
    share_out(_sweep_back, (*flat, reverse, seqlen, elements), spans, (0, elements), CHANNELS, h.numel())
    grads = {"a": h, "x": adjoints}
    return grads if initial_state is None else {**grads, "initial_state": dinitial}


def _flat(x: Tensor) -> np.ndarray:
    """Return all elements of a tensor, in order, as float32; only to be read."""
    x = x.detach()
    return np.ascontiguousarray((x if x.dtype is torch.float32 else x.float()).resolve_neg().numpy()).reshape(-1)


def _marks(reset: Tensor | None) -> np.ndarray:
    """Return what is reset, element by element, or nothing if nothing is."""
    return _NOTHING if reset is None else np.ascontiguousarray(reset.numpy()).reshape(-1)


@kernel(fastmath={"contract"})
def _sweep(
    a: Any, x: Any, reset: Any, h: Any, state: Any, reverse: Any, seqlen: Any, elements: Any, blocks: Any
) -> None:
    """Scan sequences over ranges of channels; overwrites ``state``, (k, elements)."""
    last = np.empty(CHANNELS, np.float32)
    for row, start, stop, k, low, high in blocks:
        width, at = np.uintp(high - low), np.uintp(k * elements + low)
        for c in range(width):
            last[c] = state[at + c]
        for i in range(start, stop):
            t = start + stop - 1 - i if reverse else i
            now = np.uintp((row * seqlen + t) * elements + low)
            if reset.size:
                for c in range(width):
                    last[c] = (np.float32(0.0) if reset[now + c] else a[now + c] * last[c]) + x[now + c]
                    h[now + c] = last[c]
            else:
                for c in range(width):
                    last[c] = a[now + c] * last[c] + x[now + c]
                    h[now + c] = last[c]
        for c in range(width):
            state[at + c] = last[c]


@kernel(fastmath={"contract"})
def _sweep_back(
    a: Any, reset: Any, h: Any, adjoints: Any, before: Any, carry: Any, reverse: Any, seqlen: Any, elements: Any,
    blocks: Any,
) -> None:  # fmt: skip
    """Turn results' gradients into adjoints, states into a's gradients, and last states' gradients into first ones'."""
    last = np.empty(CHANNELS, np.float32)
    for row, start, stop, k, low, high in blocks:
        width, at = np.uintp(high - low), np.uintp(k * elements + low)
        for c in range(width):
            last[c] = carry[at + c]
        for i in range(start, stop):
            t = i if reverse else start + stop - 1 - i
            now = np.uintp((row * seqlen + t) * elements + low)
            if i == stop - 1:
                for c in range(width):
                    adjoint = adjoints[now + c] + last[c]
                    adjoints[now + c] = adjoint
                    h[now + c] = adjoint * before[at + c]
                    last[c] = a[now + c] * adjoint
            else:
                earlier = np.uintp((row * seqlen + (t + 1 if reverse else t - 1)) * elements + low)
                for c in range(width):
                    adjoint = adjoints[now + c] + last[c]
                    adjoints[now + c] = adjoint
                    h[now + c] = adjoint * h[earlier + c]
                    last[c] = a[now + c] * adjoint
            if reset.size:
                for c in range(width):
                    h[now + c] = np.float32(0.0) if reset[now + c] else h[now + c]
                    last[c] = np.float32(0.0) if reset[now + c] else last[c]
        for c in range(width):
            carry[at + c] = last[c]
