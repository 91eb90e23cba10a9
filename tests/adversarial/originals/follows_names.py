"""A difference of two arguments that have names."""

import torch


class Model(torch.nn.Module):
    def forward(self, a, b):
        return a - 2 * b


def get_inputs():
    return [torch.randn(6, 10), torch.randn(6, 10)]
