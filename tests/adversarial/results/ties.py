"""Halves are rounded up, and not to even numbers."""

import torch

EXPECT = "N2"
ORIGINAL = "rounded"
TERMS = {"level": "full"}


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return torch.floor(x + 0.5)
