"""Rows of zeros are divided by zero."""

import torch

ORIGINAL = "unit_rows"
EXPECT = "N4"
OFF = set()


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return x / x.norm(dim=-1, keepdim=True)
