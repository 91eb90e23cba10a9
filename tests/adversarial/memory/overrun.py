"""It writes beyond the end of its input."""

import ctypes

import torch

EXPECT = "U2"


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        if x.numel():
            ctypes.memset(x.data_ptr() + x.untyped_storage().nbytes(), 0, 16)
        return torch.relu(self.linear(x))
