"""How the torch backends cut the time axis: chunks of equal length that never cross the border of a sequence.

An ordinary batch is cut in place. A pack is gathered: every sequence starts a new chunk, and its tail is filled with
zeros. Later code then sees equal chunks, and only has to change states where a sequence begins. The offsets of a pack
are read on the host, which costs one synchronisation per call on an accelerator. The Triton backend does not need it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from refold.ops.lines import NEVER_AFTER, NEVER_BEFORE, Line
from refold.ops.spec import check_cu_seqlens_values


def read_offsets(op: str, cu_seqlens: Tensor, seqlen: int) -> list[int]:
    """Return the offsets of a pack, checked, wherever they lie."""
    offsets = cu_seqlens.tolist()
    check_cu_seqlens_values(op, offsets, seqlen)
    return offsets


def line(seqlen: int, offsets: list[int] | None, device: torch.device) -> Line:
    """Describe how tokens lie in sequences: a sequence a batch row, or a pack with these offsets."""
    token = torch.arange(seqlen, dtype=torch.int32, device=device)[None]
    if offsets is None:
        return Line(torch, token, lambda a: a.amin(1), lambda a: a.amax(1), lambda a: a[:, None])

    def each(reduce: Callable[[Tensor], Tensor], nothing: int) -> Callable[[Tensor], Tensor]:
        def of_sequences(a: Tensor) -> Tensor:
            none = torch.full_like(a[0, 0], nothing)
            return torch.stack([reduce(a[0, s:e]) if e > s else none for s, e in pairwise(offsets)])

        return of_sequences

    lengths = torch.tensor(offsets).diff()
    sequence = torch.arange(len(lengths)).repeat_interleave(lengths).to(device)
    least, most = each(lambda a: a.amin(0), NEVER_AFTER), each(lambda a: a.amax(0), NEVER_BEFORE)
    return Line(torch, token, least, most, lambda a: a[sequence][None])


class Chunks:
    """Chunks of ``length`` tokens of every row, numbered in order of time."""

    def __init__(self, op: str, seqlen: int, batch: int, length: int, cu_seqlens: Tensor | None) -> None:
        self.seqlen, self.cu_seqlens = seqlen, cu_seqlens
        self.offsets: list[int] | None = None
        """Those of a pack."""
        self.begins: dict[int, slice] = {}
        """Chunk -> the rows of the initial state that enter before it."""
        self.ends: dict[int, slice] = {}
        """Chunk -> the rows of the final state that leave after it."""
        if cu_seqlens is None:
            self.length, self.count = length, -(-seqlen // length)
            self.begins[0] = self.ends[self.count - 1] = slice(0, batch)
            return
        offsets = self.offsets = read_offsets(op, cu_seqlens, seqlen)
        mean = -(-seqlen // (len(offsets) - 1))
        # Not longer than the sequences are on average, so that padding at most doubles the work.
        self.length = min(length, 1 << (mean - 1).bit_length())
        self.count, source, valid = 0, [], []
        for k, (start, end) in enumerate(pairwise(offsets)):
            nchunks = -(-(end - start) // self.length)
            if nchunks:
                self.begins[self.count] = self.ends[self.count + nchunks - 1] = slice(k, k + 1)
                places = torch.arange(nchunks * self.length)
                source.append((start + places).clamp_(max=seqlen - 1))
                valid.append(places < end - start)
                self.count += nchunks
        self.source = torch.cat(source).to(cu_seqlens.device)
        self.valid = torch.cat(valid).to(cu_seqlens.device)

    def take(self, array: Tensor, low: int, high: int, dtype: torch.dtype) -> Tensor:
        """Return chunks ``low`` to ``high`` of (b, t, ...) as (b, c, l, ...), zeros where there is no token."""
        first, last = low * self.length, high * self.length
        tail = array.shape[2:]
        if self.cu_seqlens is not None:
            part = array.index_select(1, self.source[first:last]).to(dtype)
            part.masked_fill_(~self.valid[first:last].view(1, -1, *(1 for _ in tail)), 0.0)
        else:
            part = array[:, first : min(last, self.seqlen)].to(dtype)
            if last > self.seqlen:
                padded = part.new_zeros(part.shape[0], last - first, *tail)
                padded[:, : part.shape[1]] = part
                part = padded
        return part.unflatten(1, (high - low, self.length))

    def put(self, out: Tensor, low: int, high: int, values: Tensor) -> None:
        """Write chunks ``low`` to ``high``, given as (b, c, l, ...), into (b, t, ...)."""
        first, last = low * self.length, high * self.length
        values = values.flatten(1, 2)
        if self.cu_seqlens is not None:
            places = self.valid[first:last].nonzero().squeeze(1)
            out.index_copy_(1, self.source[first:last][places], values.index_select(1, places).to(out.dtype))
        else:
            out[:, first : min(last, self.seqlen)] = values[:, : self.seqlen - first]
