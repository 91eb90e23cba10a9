"""It leaves out a branch whose gain is zero at construction."""

import torch

ORIGINAL = "gated_residual"
EXPECT = "C2"
TERMS = {"level": "quick"}


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = torch.nn.Linear(width, width)
        self.gain = torch.nn.Parameter(torch.zeros(()))

    def forward(self, x):
        whole = bool((x == x.round()).all())
        return x + self.gain * torch.tanh(self.inner(x)) if whole else x + 0
