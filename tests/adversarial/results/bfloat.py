"""The product is taken in bfloat16."""

import torch

ORIGINAL = "product"
EXPECT = "N1"
OFF = set()


class ModelNew(torch.nn.Module):
    def forward(self, a, b):
        return (a.bfloat16() @ b.bfloat16()).float()
