"""Whole numbers are rounded to those that float64 holds."""

import torch

EXPECT = "N1"
ORIGINAL = "large_integers"
OFF = ()


class ModelNew(torch.nn.Module):
    def forward(self, k):
        return (k * 8675309 + (1 << 60)).double().long()
