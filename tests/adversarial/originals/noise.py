"""Adds random numbers."""

import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return x + 0.5 * torch.randn_like(x)


def get_inputs():
    return [torch.randn(6, 10)]
