"""It reads weights through a view that it made at construction."""

import torch

EXPECT = "C2"
OFF = set()
TERMS = {"level": "quick"}


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.rows, self.bias = self.linear.weight.detach().t(), self.linear.bias.detach()

    def forward(self, x):
        return torch.relu(x @ self.rows + self.bias)
