"""Two results in a named tuple."""

import collections

import torch

Range = collections.namedtuple("Range", "low high")


class Model(torch.nn.Module):
    def forward(self, x):
        return Range(x.amin(-1), x.amax(-1))


def get_inputs():
    return [torch.randn(6, 10)]
