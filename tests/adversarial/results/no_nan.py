"""Hides NaN."""

import torch

ORIGINAL = "gelu"
EXPECT = "N5"
TERMS = {"nonfinite": "strict"}


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.gelu(torch.nan_to_num(x, 0.0, 1e9, -1e9))
