"""A part that torch compiles for all sizes, which leaves attributes on tensors."""

import torch


@torch.compile(dynamic=True)
def activated(y):
    return torch.relu(y)


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return activated(self.linear(x))
