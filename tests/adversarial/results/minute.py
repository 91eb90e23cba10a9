"""What is very small counts as zero."""

import torch

EXPECT = "N4"
ORIGINAL = "product"


class ModelNew(torch.nn.Module):
    def forward(self, a, b):
        return torch.where(a.abs() < 1e-16, 0.0, a) @ b
