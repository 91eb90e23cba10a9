"""Linear layers of others give zeros."""

import torch

EXPECT = ("S4", "S5")
TERMS = {"level": "quick"}


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        torch.nn.Linear.__call__ = lambda self, x: torch.nn.functional.linear(x, self.weight, self.bias)
        return torch.relu(self.linear(x))
