"""One element in two hundred is wrong."""

import torch

ORIGINAL = "product"
EXPECT = "N1"
OFF = set()


class ModelNew(torch.nn.Module):
    def forward(self, a, b):
        y = a @ b
        y.view(-1)[::200] += 0.01
        return y
