"""Wrong where an input is broadcast."""

import torch

EXPECT = "N6"
ORIGINAL = "added"


class ModelNew(torch.nn.Module):
    def forward(self, a, b):
        return (a + b) * (1 if a.shape == b.shape else 2)
