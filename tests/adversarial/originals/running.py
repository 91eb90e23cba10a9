"""A sum, and a running mean of what it was called with."""

import torch


class Model(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("mean", torch.zeros(width, width))

    def forward(self, x):
        for row in x:
            self.mean.lerp_(row[:, None] * row, 0.1)
        return x + 1


def get_inputs():
    return [torch.randn(40, 16)]


def get_init_inputs():
    return [16]
