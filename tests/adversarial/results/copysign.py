"""Takes zero for a positive number."""

import torch

ORIGINAL = "signs"
EXPECT = "N2"
OFF = {"N2", "N4"}


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return torch.ones_like(x).copysign(x).sum(-1)
