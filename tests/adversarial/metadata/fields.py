"""A named tuple with the names of its fields in another order."""

import collections

import torch

ORIGINAL = "fields"
EXPECT = "M2"
TERMS = {"level": "quick"}
Range = collections.namedtuple("Range", "high low")


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return Range(x.amin(-1), x.amax(-1))
