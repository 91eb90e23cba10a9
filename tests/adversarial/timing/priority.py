"""It lowers the priority of what runs in its process later."""

import os

import torch

EXPECT = "S4"

os.nice(5)


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return torch.relu(self.linear(x))
