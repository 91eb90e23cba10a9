"""What CPU kernels compiled by Numba have in common: sequences are cut into blocks of channels, and given to threads.

Threads are started for a call and joined before it ends. This is safe under fork and from any thread. There are as
many threads as torch uses, or fewer if there is less work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from refold.ops.numba.kernel import Kernel
from refold.ops.numba.machine import Slot
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
    kernel: Kernel,
    given: Sequence[Any],
    spans: tuple[tuple[int, ...], ...],
    edges: tuple[int, ...],
    width: int,
    updates: int,
) -> Callable[..., None]:
    """Return what calls ``kernel(*given, blocks)`` until all are done; a block is a span and a range of channels.

    Args:
        kernel: It releases the interpreter lock.
        given: What it takes. Tensors stand for others of the same dtypes and shapes; none is kept.
        spans: What `spans_of` returned.
        edges: Channels at which a block must end, from 0 to the number of channels.
        width: The most channels of a block.
        updates: State updates of the whole call.

    Returns:
        A function of the tensors, which must be contiguous.
    """
    slots = [Slot(x.dtype, tuple(x.shape)) if isinstance(x, Tensor) else x for x in given]
    blocks = _blocks(spans, edges, width)
    most = min(len(blocks), updates // UPDATES_A_THREAD)

    @cache
    def prepared(workers: int) -> list[Callable[..., None]]:
        pieces = [blocks] if workers <= 1 else np.array_split(blocks, min(len(blocks), PIECES_A_THREAD * workers))
        return [kernel.prepared(*slots, piece) for piece in pieces]

    def run(*tensors: Tensor) -> None:
        workers = max(1, min(torch.get_num_threads(), most))
        calls = prepared(workers)
        if workers == 1:
            calls[0](*tensors)
            return
        # A list's iterator gives each piece to one thread. Those that start late, because the threads of a torch
        # operation still spin on their cores, find less left to do.
        left = iter(calls)

        def work(*_: Any) -> None:
            for call in left:
                call(*tensors)

        with ThreadPoolExecutor(workers - 1) as pool:
            others = pool.map(work, range(workers - 1))
            work()
            list(others)

    return run


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
