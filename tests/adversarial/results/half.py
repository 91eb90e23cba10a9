"""The product is taken in half precision."""

import torch

ORIGINAL = "product"
EXPECT = "N1"
OFF = set()


class ModelNew(torch.nn.Module):
    def forward(self, a, b):
        return (a.half() @ b.half()).float()
