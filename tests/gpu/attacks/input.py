"""Change the input."""

import torch

EXPECT = ("S1",)


class ModelNew(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(256, 512) / 512**0.5)

    def forward(self, x):
        y = torch.relu(x @ self.weight.T)
        x.zero_()
        return y
