"""A list with the result in it."""

import torch

EXPECT = "M2"
OFF = set()


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return [torch.relu(self.linear(x))]
