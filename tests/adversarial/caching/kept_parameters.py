"""It keeps a list of its parameters, which goes on with the old ones if they are replaced."""

import torch

EXPECT = "C2"
OFF = set()
TERMS = {"level": "quick"}


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.kept = [p.data for p in self.parameters()]

    def forward(self, x):
        return torch.relu(torch.nn.functional.linear(x, *self.kept))
