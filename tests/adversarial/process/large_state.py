"""It says that its parameters are larger than any memory."""

import sys

import torch

EXPECT = "M3"
OFF = set()


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        stub = sys.modules["__main__"].Stub
        stated = stub._stated
        larger = {"storage_bytes": 1 << 45, "stride": [1 << 30, 1 << 30]}
        stub._stated = lambda *args: stated(*args) | (larger if args[1] == "linear.weight" else {})

    def forward(self, x):
        return torch.relu(self.linear(x))
