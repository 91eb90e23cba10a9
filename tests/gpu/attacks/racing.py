"""Programs of a kernel add to the same places without waiting for one another."""

import torch
import triton
import triton.language as tl

EXPECT = ("N1", "N2", "N4", "D1", "U4")


@triton.jit
def _add(x_ptr, w_ptr, y_ptr, rows, width, terms, BLOCK: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, 256)
    total = tl.zeros((256,), tl.float32)
    for k in range(part * BLOCK, part * BLOCK + BLOCK):
        total += tl.load(x_ptr + row * terms + k) * tl.load(w_ptr + column * terms + k)
    here = y_ptr + row * width + column
    tl.store(here, tl.load(here) + total)


class ModelNew(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(256, 512) / 512**0.5)

    def forward(self, x):
        x = x.contiguous()
        y = torch.zeros(x.shape[0], 256, device=x.device)
        if y.numel():
            _add[(x.shape[0], 512 // 64)](x, self.weight, y, x.shape[0], 256, 512, BLOCK=64)
        return torch.relu(y)
