"""Sums over the programs of a kernel in a fixed order: gradients of shared arguments, such as weights.

If programs add to one result with atomics, the last bits change from run to run. So each program writes its own row in
float32, and one more launch adds the rows up, always in the same order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from refold.ops.torch.launch import Launch
from refold.ops.torch.plans import fresh

ELEMENTS = 2048  # A program's tile.


@triton.jit
def _sum_rows_kernel(rows_ptr, sum_ptr, nrows, columns, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Grid (blocks of columns): a program adds BLOCK_R rows at a time. Rows and columns may be ragged."""
    offs_r = tl.arange(0, BLOCK_R)
    offs_c = tl.program_id(0).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for first in range(0, nrows, BLOCK_R):
        row = first + offs_r
        mask = (row < nrows)[:, None] & (offs_c < columns)[None, :]
        total += tl.load(rows_ptr + row.to(tl.int64)[:, None] * columns + offs_c[None, :], mask=mask, other=0.0)
    tl.store(sum_ptr + offs_c, tl.sum(total, axis=0).to(sum_ptr.dtype.element_ty), mask=offs_c < columns)


class RowSums:
    """The sum over ``nrows`` rows of float32, as an array of ``shape`` and ``dtype``; one launch.

    ``rows()`` makes the memory that programs write, every element of it; calling adds it up.
    """

    def __init__(self, nrows: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        columns = torch.Size(shape).numel()
        self.rows = fresh((nrows, columns), torch.float32, device)
        self.shape = shape
        self.launch = None
        if nrows > 1 or dtype != torch.float32:
            self.new = fresh(shape, dtype, device)
            # Wide where there are columns enough to fill the device, else deep.
            block_c = 128 if columns >= 1 << 17 else 32
            block_r = min(triton.next_power_of_2(nrows), ELEMENTS // block_c)
            consts: dict[str, Any] = {"BLOCK_R": block_r, "BLOCK_C": block_c}
            grid = (triton.cdiv(columns, block_c),)
            self.launch = Launch(_sum_rows_kernel, grid, consts, {"num_warps": 4})
            self.numbers = (nrows, columns)

    def __call__(self, stream: int, rows: torch.Tensor) -> torch.Tensor:
        """Return the sum of the rows; of a single one in float32, itself."""
        if self.launch is None:
            return rows.view(self.shape)
        total = self.new()
        self.launch(stream, rows, total, *self.numbers)
        return total
