"""Tiles of arrays in the first-level cache, for kernels compiled by Numba, and the vectors that work on them.

A loop that indexes big arrays is not vectorised: an index might be negative, and would then count from the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

PAGE = 1024
"""Numbers in a page."""


def _widest_vectors(_: Any) -> tuple[Any, Callable[..., Any]]:
    """Have the function that calls this vectorised as wide as the processor can.

    LLVM takes half of AVX-512 unless told otherwise: its widest vectors once lowered the clock. llvmlite knows no such
    attribute by name, hence ``set.add``.
    """

    def generate(context: Any, builder: Any, *_: Any) -> Any:
        # Without it kernels are right, and slower on AVX-512.
        attributes = getattr(builder.function, "attributes", None)
        if isinstance(attributes, set):
            set.add(attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.none(), generate


widest_vectors: Any = intrinsic(_widest_vectors)


@numba.njit(nogil=True)
def tile_of(rows: Any, columns: Any, quarter: Any) -> Any:
    """Return zeros that begin at a quarter of a page.

    That is where a cache line begins, and a vector that spans two lines takes twice as long to load. Tiles that are
    written and tiles that are read at the same time want different quarters: a load waits for an earlier store whose
    address has the same last twelve bits.
    """
    memory = np.zeros(rows * columns + PAGE, np.float32)
    skip = (quarter * PAGE // 4 - memory.ctypes.data // 4) % PAGE
    return memory[skip : skip + rows * columns].reshape(rows, columns)


@numba.njit(nogil=True)
def read_tile(source: Any, first: Any, left: Any, right: Any, tile: Any, rows: Any) -> None:
    """Copy ``rows`` rows of ``source`` from ``first`` on, columns ``left`` to ``right``; zeros fill the tile's rest."""
    for i in range(rows):
        line = source[first + i, left:right]
        for c in range(len(line)):
            tile[i, c] = line[c]
        for c in range(len(line), tile.shape[1]):
            tile[i, c] = 0


@numba.njit(nogil=True)
def write_tile(tile: Any, rows: Any, target: Any, first: Any, left: Any, right: Any) -> None:
    """Copy a tile back."""
    for i in range(rows):
        line = target[first + i, left:right]
        for c in range(len(line)):
            line[c] = tile[i, c]
