"""A number among the arguments is not read."""

import torch

ORIGINAL = "scaled"
EXPECT = "N6"
TERMS = {"level": "quick"}


class ModelNew(torch.nn.Module):
    def forward(self, x, scale):
        return torch.tanh(x) * 0.5
