"""It describes a structure with one tensor, and no tensor."""

import dataclasses
import sys

import torch

EXPECT = "P4"
OFF = set()
stub = sys.modules["__main__"].Stub
go = stub.go
stub.go = lambda self: dataclasses.replace(go(self), tensors=[])


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return torch.relu(self.linear(x))
