"""A kernel in Triton."""

import torch
import triton
import triton.language as tl

EXPECT = "accepted"


@triton.jit
def _relu(x_ptr, y_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, at < count, 0.0)
    tl.store(y_ptr + at, tl.where(x != x, x, tl.maximum(x, 0.0)), at < count)


class ModelNew(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(256, 512) / 512**0.5)

    def forward(self, x):
        y = (x @ self.weight.T).contiguous()
        out = torch.empty_like(y)
        if y.numel():
            _relu[(triton.cdiv(y.numel(), 1024),)](y, out, y.numel(), BLOCK=1024)
        return out
