"""The causal depthwise convolution on torch: one multiply-add over the whole input per tap.

Every sequence is extended by the window before it: its initial state, or zeros. The extended sequences of a
pack follow one another, so one plain convolution serves a batch and a pack. Its results between two sequences are
dropped.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from refold.ops.causal_conv1d.spec import SPEC, STEP
from refold.ops.torch.chunks import read_offsets
from refold.ops.torch.pointwise import accumulator
from refold.ops.torch.short import short_backward, short_scan


def causal_conv1d(
    *, x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None,
    activation: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `refold.ops.causal_conv1d`."""
    windows = _Windows(x, weight.shape[1], cu_seqlens)
    extended = windows.extend(x, initial_state)
    y = windows.tokens(windows.convolve(extended, weight, bias, nothing_before=initial_state is None))
    if activation == "silu":
        y = F.silu(y, inplace=True)
    return y.to(x.dtype).contiguous(), windows.final(extended).to(x.dtype)


def causal_conv1d_backward(
    *, dy: Tensor | None, dstate: Tensor | None, needs: frozenset[str], x: Tensor, weight: Tensor, bias: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, activation: str | None,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the gradients of all array arguments that are present, whatever ``needs`` says."""
    width = weight.shape[1]
    windows = _Windows(x, width, cu_seqlens)
    extended = windows.extend(x, initial_state)
    dout = torch.zeros_like(x, dtype=extended.dtype) if dy is None else dy.to(extended.dtype)
    if activation == "silu":
        raw = windows.tokens(windows.convolve(extended, weight, bias, nothing_before=initial_state is None))
        gate = torch.sigmoid(raw)
        dout = dout * gate * (1 + raw * (1 - gate))
    dextended = torch.zeros_like(extended)
    dweight = torch.empty(weight.shape, dtype=extended.dtype, device=weight.device)
    for j, tap in enumerate(weight.to(extended.dtype).unbind(1)):
        windows.add_to(dextended, j, dout, tap)
        dweight[:, j] = (windows.read(extended, j) * dout).sum((0, 1))
    if dstate is not None:
        windows.add_final_gradient(dextended, dstate)
    grads = {"x": windows.inputs(dextended), "weight": dweight}
    if bias is not None:
        grads["bias"] = dout.sum((0, 1))
    if initial_state is not None:
        grads["initial_state"] = windows.initial(dextended)
    return grads


causal_conv1d_step = short_scan(SPEC, STEP, causal_conv1d)
causal_conv1d_step_backward = short_backward(SPEC, STEP, causal_conv1d_backward)


class _Windows:
    """Extended sequences: w - 1 earlier inputs before each."""

    def __init__(self, x: Tensor, width: int, cu_seqlens: Tensor | None) -> None:
        self.batch, self.seqlen, self.channels = x.shape
        self.dtype, self.front = accumulator(x.dtype), width - 1
        self.packed, self.rows = cu_seqlens is not None, self.batch
        if cu_seqlens is None:
            return
        offsets = read_offsets("causal_conv1d", cu_seqlens, self.seqlen)
        self.rows = len(offsets) - 1
        # Place of every extended token in [inputs, initial windows one after the other], sequence by sequence.
        source, ends = [], []
        for k, (start, end) in enumerate(pairwise(offsets)):
            window = self.seqlen + k * self.front
            source += [torch.arange(window, window + self.front), torch.arange(start, end)]
            ends.append(end + (k + 1) * self.front)
        place = torch.cat(source)
        self.real = (place < self.seqlen).to(x.device)
        where = torch.empty_like(place)
        where[place] = torch.arange(place.numel())
        tails = torch.tensor(ends)[:, None] + torch.arange(-self.front, 0)
        self.place, self.where, self.tails = (i.to(x.device) for i in (place, where, tails.flatten()))

    def extend(self, x: Tensor, initial: Tensor | None) -> Tensor:
        """Return the extended sequences, (b, e, d)."""
        if initial is not None:
            fronts = initial.to(self.dtype).mT  # (k, w - 1, d)
        else:
            fronts = torch.zeros(self.rows, self.front, self.channels, dtype=self.dtype, device=x.device)
        if not self.packed:
            return torch.cat([fronts, x.to(self.dtype)], 1)
        return torch.cat([x[0].to(self.dtype), fronts.flatten(0, 1)]).index_select(0, self.place)[None]

    def convolve(self, extended: Tensor, weight: Tensor, bias: Tensor | None, *, nothing_before: bool) -> Tensor:
        """Return the convolution at every position that has a full window, (b, e - w + 1, d).

        With nothing before the sequences, zeros stand there, and are not multiplied: a weight may be infinite.
        """
        count = extended.shape[1] - self.front
        *earlier, last = weight.to(extended.dtype).unbind(1)
        out = extended[:, self.front :] * last
        for j, tap in reversed(list(enumerate(earlier))):
            read, summed = extended[:, j : j + count], out
            if nothing_before and self.packed:
                out += torch.where(self.real[j : j + count, None], read * tap, 0.0)
                continue
            if nothing_before:
                read, summed = read[:, self.front - j :], out[:, self.front - j :]
            summed.addcmul_(read, tap.expand_as(summed))
        return out if bias is None else out.add_(bias.to(out.dtype))

    def tokens(self, out: Tensor) -> Tensor:
        """Return the results at tokens, (b, t, d), of those at every full window."""
        return out if not self.packed else out.index_select(1, self.where[: self.seqlen] - self.front)

    def read(self, extended: Tensor, j: int) -> Tensor:
        """Take the inputs that tap ``j`` reads for each token, (b, t, d)."""
        if not self.packed:
            return extended[:, j : j + self.seqlen]
        return extended.index_select(1, self.where[: self.seqlen] - self.front + j)

    def add_to(self, extended: Tensor, j: int, values: Tensor, tap: Tensor) -> None:
        """Add ``tap * values`` (b, t, d) to what tap ``j`` reads."""
        if not self.packed:
            extended[:, j : j + self.seqlen].addcmul_(values, tap.expand_as(values))
        else:
            extended.index_add_(1, self.where[: self.seqlen] - self.front + j, values * tap)

    def final(self, extended: Tensor) -> Tensor:
        """Return the last w - 1 inputs of each sequence, (k, d, w - 1)."""
        if not self.packed:
            tail = extended[:, extended.shape[1] - self.front :]
        else:
            tail = extended[0].index_select(0, self.tails).reshape(self.rows, self.front, self.channels)
        return tail.mT.contiguous()

    def add_final_gradient(self, dextended: Tensor, dstate: Tensor) -> None:
        """Let the gradient of the final windows reach the inputs that they hold."""
        dtail = dstate.to(dextended.dtype).mT
        if not self.packed:
            dextended[:, dextended.shape[1] - self.front :] += dtail
        else:
            dextended[0].index_add_(0, self.tails, dtail.flatten(0, 1))

    def inputs(self, extended: Tensor) -> Tensor:
        """Take the part of the inputs, (b, t, d)."""
        return extended[:, self.front :] if not self.packed else extended.index_select(1, self.where[: self.seqlen])

    def initial(self, extended: Tensor) -> Tensor:
        """Take the part of the initial windows, (k, d, w - 1)."""
        if not self.packed:
            return extended[:, : self.front].mT
        return extended[0].index_select(0, self.where[self.seqlen :]).reshape(self.rows, self.front, self.channels).mT
