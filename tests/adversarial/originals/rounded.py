"""Numbers rounded to whole ones, halves to even ones."""

import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.round(x)


def get_inputs():
    return [3 * torch.randn(6, 10)]
