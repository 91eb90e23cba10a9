"""What CPU kernels compiled by Numba have in common: sequences are cut into blocks of channels, and given to threads.

The threads of a process wait between calls. A fork has threads of its own, and any thread may call. As many take part
as torch uses, or fewer if there is less work.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from refold.ops.numba.kernel import Kernel
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


class ArgumentPlace(NamedTuple):
    """The place of a contiguous tensor that each call brings."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def in_threads(work: Callable[[Any], None], pieces: Sequence[Any], workers: int) -> None:
    """Call ``work`` with each piece, in this thread and ``workers - 1`` others."""
    # A list's iterator gives each piece to one thread. Those that start late, because the threads of a torch operation
    # still spin on their cores, find less left to do.
    left = iter(list(pieces))

    def take() -> None:
        for piece in left:
            work(piece)

    helpers = [_pool(os.getpid()).submit(take) for _ in range(workers - 1)]
    take()
    for helper in helpers:
        if not helper.cancel():  # one that has not begun finds nothing left to do
            helper.result()


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    """Keep the threads of this process; a fork has none of its parent's."""
    return ThreadPoolExecutor(thread_name_prefix=f"refold-{process}")


def share_out(
    kernel: Kernel,
    given: Sequence[Any],
    spans: tuple[tuple[int, ...], ...],
    edges: tuple[int, ...],
    width: int,
    updates: int,
) -> Callable[..., None]:
    """Plan calls of ``kernel(*given, blocks)`` that together make up all blocks: spans and ranges of channels.

    Args:
        kernel: It releases the interpreter lock.
        given: What it takes. Slots, or tensors, stand for tensors of these dtypes and shapes; none is kept.
        spans: Those of `spans_of`.
        edges: Channels at which a block must end, from 0 to the number of channels.
        width: The most channels of a block.
        updates: State updates of the whole call.

    Returns:
        A function of the tensors, which must be contiguous.
    """
    places = {i: tuple(x.shape) for i, x in enumerate(given) if isinstance(x, ArgumentPlace | Tensor)}
    others = [None if i in places else x for i, x in enumerate(given)]
    blocks = _blocks(spans, edges, width)
    most = min(len(blocks), updates // UPDATES_A_THREAD)

    @cache
    def pieces(workers: int) -> list[np.ndarray]:
        return [blocks] if workers == 1 else np.array_split(blocks, min(len(blocks), PIECES_A_THREAD * workers))

    def run(*tensors: Tensor) -> None:
        workers, views = max(1, min(torch.get_num_threads(), most)), list(others)
        for (place, shape), x in zip(places.items(), tensors, strict=True):
            views[place] = (x.detach() if x.requires_grad else x).numpy().reshape(shape)
        in_threads(lambda piece: kernel(*views, piece), pieces(workers), workers)

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
