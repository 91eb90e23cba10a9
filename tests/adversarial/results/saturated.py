"""What is large is cut off."""

import torch

ORIGINAL = "double"
EXPECT = "N4"
OFF = {"N4"}


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return (2 * x).clamp(-1e5, 1e5)
