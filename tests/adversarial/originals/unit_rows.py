"""Rows divided by their norm, and not by zero."""

import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.normalize(x, dim=-1)


def get_inputs():
    return [torch.randn(6, 30)]
