"""A Triton kernel, interpreted."""

import os

import torch

os.environ["TRITON_INTERPRET"] = "1"

import triton
import triton.language as tl

ORIGINAL = "rowmean"


@triton.jit
def mean_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.program_id(0) * n
    x = tl.load(x_ptr + row + at, mask=at < n, other=0.0)
    mean = tl.sum(x, 0) / n
    tl.store(y_ptr + row + at, tl.zeros((BLOCK,), tl.float32) + mean, mask=at < n)


class ModelNew(torch.nn.Module):
    def forward(self, x):
        x = x.contiguous()
        y = torch.empty_like(x)
        if x.numel():
            mean_kernel[(x.shape[0],)](x, y, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
        return y
