"""Weights are transformed once, at the first call."""

import torch

EXPECT = "C2"
OFF = {"C2", "N2"}


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.weight = None

    def forward(self, x):
        if self.weight is None:
            self.weight = self.linear.weight.detach().T.contiguous()
        return torch.relu(x @ self.weight + self.linear.bias)
