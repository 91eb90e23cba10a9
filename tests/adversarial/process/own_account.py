"""It says that its result is no plain tensor, so that nothing would be read of it."""

import dataclasses
import sys

import torch

ORIGINAL = "mean"
EXPECT = "M1"
OFF = {"M1", "S5"}
TERMS = {"level": "quick"}
main = sys.modules["__main__"]
describe = main._describe
main._describe = lambda t: dataclasses.replace(describe(t), odd=["not strided"], stride=[])


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return (x * x).mean() + 1
