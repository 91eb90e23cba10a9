"""It keeps its weights in another precision, as they were at its first call."""

import torch

EXPECT = "C2"
OFF = set()
TERMS = {"level": "quick"}


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.kept = None

    def forward(self, x):
        if self.kept is None:
            self.kept = [p.detach().double() for p in self.linear.parameters()]
        return torch.relu(torch.nn.functional.linear(x.double(), *self.kept)).to(x.dtype)
