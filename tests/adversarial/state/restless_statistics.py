"""Other bits in each call; the original keeps a running mean, which changes its bits, too."""

import itertools

import torch

ORIGINAL = "centred"
EXPECT = "D1"
TERMS = {"level": "quick"}
TURNS = itertools.count()


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x):
        self.mean.lerp_(x.mean(0).detach(), 0.1)
        return (x - self.mean) * (1 + 2.0**-23 * (next(TURNS) % 2))
