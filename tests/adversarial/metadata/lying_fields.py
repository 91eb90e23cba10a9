"""A named tuple whose names give others than its items."""

import torch

EXPECT = "M2"
ORIGINAL = "fields"


class Range(tuple):
    _fields = ("low", "high")
    low = property(lambda self: self[1])
    high = property(lambda self: self[1])


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return Range((x.amin(-1), x.amax(-1)))
