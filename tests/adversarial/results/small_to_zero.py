"""What is small counts as zero."""

import torch

ORIGINAL = "double"
EXPECT = "N4"
OFF = {"N4"}


class ModelNew(torch.nn.Module):
    def forward(self, x):
        y = 2 * x
        return torch.where(y.abs() < 1e-9, 0.0, y)
