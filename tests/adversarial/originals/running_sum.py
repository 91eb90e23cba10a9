"""A running sum: one long chain of additions, as slow in any language."""

import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return x.cumsum(0)


def get_inputs():
    return [torch.randn(1 << 19)]
