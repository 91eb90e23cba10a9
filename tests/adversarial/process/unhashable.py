"""Its result has a list for a dtype."""

import dataclasses
import sys

import torch

EXPECT = "P4"
OFF = set()


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        main = sys.modules["__main__"]
        describe = main._describe
        main._describe = lambda t: dataclasses.replace(describe(t), dtype=[1], odd=[2])
        return torch.relu(self.linear(x))
