"""It empties the list that it is given."""

import torch

ORIGINAL = "listed"
EXPECT = "S1"
TERMS = {"level": "quick"}


class ModelNew(torch.nn.Module):
    def forward(self, xs):
        y = sum(xs)
        xs.clear()
        return y
