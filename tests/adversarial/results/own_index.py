"""The index is not read."""

import torch

ORIGINAL = "chosen"
EXPECT = "N6"
TERMS = {"level": "quick"}


class ModelNew(torch.nn.Module):
    def forward(self, x, index):
        return x[[4, 1, 5, 0, 3, 2]]
