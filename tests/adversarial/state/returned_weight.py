"""It returns its weight where the original returns a copy."""

import torch

ORIGINAL = "offset"
EXPECT = {"S2", "S7"}
OFF = {"S2", "S7"}
TERMS = {"level": "quick"}


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.offset = torch.nn.Parameter(torch.randn(width))

    def forward(self, x):
        return x + self.offset, self.offset.detach()
