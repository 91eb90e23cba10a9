"""Do the work twice: right, and no faster."""

import torch

EXPECT = ("T7",)
TERMS = {"accept": "faster", "level": "quick"}


class ModelNew(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(256, 512) / 512**0.5)

    def forward(self, x):
        for _ in range(40):
            y = torch.relu(x @ self.weight.T)
        return y
