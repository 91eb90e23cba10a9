"""The right direction, one percent too long."""

import torch

ORIGINAL = "product"
EXPECT = "N1"
OFF = set()


class ModelNew(torch.nn.Module):
    def forward(self, a, b):
        return 1.01 * (a @ b)
