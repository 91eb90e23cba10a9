"""Computed once more in the backward, by what imports torch's compiler."""

import torch
from torch.utils.checkpoint import checkpoint

TERMS = {"train": True, "level": "quick"}


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return checkpoint(lambda x: torch.relu(self.linear(x)), x, use_reentrant=False)
