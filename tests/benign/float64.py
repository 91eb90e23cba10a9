"""Computed in float64."""

import torch

ORIGINAL = "softmax"


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return torch.softmax(0.01 * x.double(), -1).to(x.dtype)
