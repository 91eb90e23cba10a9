"""A Triton kernel, interpreted."""

import os

import torch

os.environ["TRITON_INTERPRET"] = "1"

import triton
import triton.language as tl

ORIGINAL = "rowmean"


@triton.jit
def mean_kernel(x_ptr, y_ptr, rows, n, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    there = (row < rows) & (at < n)
    x = tl.load(x_ptr + row * n + at, mask=there, other=0.0)
    mean = tl.sum(x, 1, keep_dims=True) / n
    tl.store(y_ptr + row * n + at, tl.zeros((ROWS, BLOCK), tl.float32) + mean, mask=there)


class ModelNew(torch.nn.Module):
    def forward(self, x):
        x = x.contiguous()
        y = torch.empty_like(x)
        if x.numel():
            rows, n = x.shape
            mean_kernel[(triton.cdiv(rows, 64),)](x, y, rows, n, ROWS=64, BLOCK=triton.next_power_of_2(n))
        return y
