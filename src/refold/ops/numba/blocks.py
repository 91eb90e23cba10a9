"""What CPU kernels compiled by Numba have in common: sequences are cut into blocks of channels, and given to threads.

Threads are started for a call and joined before it ends. This is safe under fork and from any thread. There are as
many threads as torch uses, or fewer if there is less work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from refold.ops.spec import Meta
from refold.ops.torch.chunks import read_offsets

UPDATES_A_THREAD = 1 << 18
"""State updates that are worth a thread: about 0.1 ms of work, the cost of starting one."""
PIECES_A_THREAD = 8
"""Pieces that the work of a thread is cut into, to be taken by who is free: handing one over takes 20 us."""


def supports(meta: Meta) -> str | None:
    """Tell why these arguments cannot be run."""
    if meta.device != "cpu":
        return f"runs on the CPU; {next(iter(meta.arrays))} is on {meta.device}"
    if any(array.dtype == "float64" for array in meta.arrays.values()):
        return "computes in float32; float64 inputs are the torch backend's"
    return None


def spans_of(op: str, batch: int, seqlen: int, cu_seqlens: Tensor | None) -> tuple[tuple[int, ...], ...]:
    """Return for each sequence its row of the batch, first token, last plus one, and row of the states."""
    if cu_seqlens is None:
        return tuple((row, 0, seqlen, row) for row in range(batch))
    return tuple((0, start, stop, k) for k, (start, stop) in enumerate(pairwise(read_offsets(op, cu_seqlens, seqlen))))


def share_out(
    sweep: Callable[..., None],
    arrays: Sequence[Any],
    spans: tuple[tuple[int, ...], ...],
    edges: tuple[int, ...],
    width: int,
    updates: int,
) -> None:
    """Call ``sweep(*arrays, blocks)`` until all blocks are done; a block is a span and a range of channels.

    Args:
        sweep: A compiled function that releases the interpreter lock.
        arrays: What it takes.
        spans: What `spans_of` returned.
        edges: Channels at which a block must end, from 0 to the number of channels.
        width: The most channels of a block.
        updates: State updates of the whole call.
    """
    blocks = _blocks(spans, edges, width)
    workers = min(torch.get_num_threads(), len(blocks), updates // UPDATES_A_THREAD)
    if workers <= 1:
        sweep(*arrays, blocks)
        return
    # A list's iterator gives each piece to one thread. Those that start late, because the threads of a torch operation
    # still spin on their cores, find less left to do.
    pieces = iter(np.array_split(blocks, min(len(blocks), PIECES_A_THREAD * workers)))

    def work(*_: Any) -> None:
        for piece in pieces:
            sweep(*arrays, piece)

    with ThreadPoolExecutor(workers - 1) as pool:
        others = pool.map(work, range(workers - 1))
        work()
        list(others)


@lru_cache(maxsize=64)
def _blocks(spans: tuple[tuple[int, ...], ...], edges: tuple[int, ...], width: int) -> np.ndarray:
    """Return an array whose rows are a span and a range of channels; only to be read."""
    return np.array(
        [
            (*span, low, min(low + width, end))
            for span in spans
            for begin, end in pairwise(edges)
            for low in range(begin, end, width)
        ]
    )


def zeros_or_copy(initial: Tensor | None, *shape: int) -> Tensor:
    """Return the states that the sequences start from, to be overwritten."""
    if initial is None:
        return torch.zeros(shape, dtype=torch.float32)
    state = torch.empty(initial.shape, dtype=torch.float32)
    return state.copy_(initial)
