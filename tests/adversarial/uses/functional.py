"""Wrong by torch.func.functional_call."""

import torch

EXPECT = "C2"
TERMS = {"level": "full"}


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        y = torch.relu(self.linear(x))
        return y if isinstance(self.linear.weight, torch.nn.Parameter) else 2 * y
