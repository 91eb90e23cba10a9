"""A deep copy of it computes with the weights that it had at first."""

import copy

import torch

EXPECT = "C2"
TERMS = {"level": "full"}


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.first = None

    def __deepcopy__(self, memo):
        new = ModelNew(self.linear.in_features)
        new.linear, new.first = copy.deepcopy(self.linear), self.linear.weight.detach().clone()
        return new

    def forward(self, x):
        weight = self.linear.weight if self.first is None else self.first
        return torch.relu(torch.nn.functional.linear(x, weight, self.linear.bias))
