"""It says that its parameters are larger than any memory."""

import dataclasses
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

        def larger(*args):
            m = stated(*args)
            return dataclasses.replace(m, stride=[1 << 30, 1 << 30]) if args[1] == "linear.weight" else m

        stub._stated = larger

    def forward(self, x):
        return torch.relu(self.linear(x))
