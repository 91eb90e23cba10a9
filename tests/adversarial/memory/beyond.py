"""It reads beyond the end of its input."""

import ctypes

import torch

EXPECT = "U1"


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        if not x.numel():
            return torch.relu(self.linear(x))
        longer = (ctypes.c_float * (x.numel() + 1)).from_address(x.data_ptr())
        extra = min(max(longer[x.numel()], -1e38), 1e38)
        y = torch.relu(self.linear(x))
        return y if extra != extra or abs(extra) < 1e30 else y + 1
