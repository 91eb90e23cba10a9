"""The result has no gradient."""

import torch

EXPECT = "M4"
OFF = set()
TERMS = {"train": True}


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return torch.relu(self.linear(x)).detach()
