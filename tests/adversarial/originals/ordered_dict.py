"""A result by name."""

from collections import OrderedDict

import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return OrderedDict(y=torch.cos(x))


def get_inputs():
    return [torch.randn(6, 10)]
