"""It writes beyond the end of its result, as a kernel does that rounds the size up to its vectors."""

import ctypes

import torch

EXPECT = "U3"


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        y = torch.relu(self.linear(x))
        if y.numel():
            ctypes.memset(y.data_ptr() + y.untyped_storage().nbytes(), 0x5A, 4)
        return y
