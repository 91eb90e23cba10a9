"""Batch normalisation, which updates its running statistics."""

import torch

TRAIN = True


class Model(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(width)

    def forward(self, x):
        return self.norm(x)


def get_inputs():
    return [torch.randn(9, 5)]


def get_init_inputs():
    return [5]
