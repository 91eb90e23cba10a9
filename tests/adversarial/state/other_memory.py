"""It gives the caller's tensor other memory, which holds zeros."""

import torch

ORIGINAL = "copy"
EXPECT = "S1"
TERMS = {"level": "quick"}


class ModelNew(torch.nn.Module):
    def forward(self, x):
        y = x.clone()
        x.data = torch.zeros_like(x)
        return y
