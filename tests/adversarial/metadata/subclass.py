"""A subclass of Tensor, which may compute when it is looked at."""

import torch

EXPECT = "M1"


class Lazy(torch.Tensor):
    pass


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return torch.relu(self.linear(x)).as_subclass(Lazy)
