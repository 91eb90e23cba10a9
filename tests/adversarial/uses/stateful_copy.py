"""A layer with a running mean has other weights in a deep copy of it."""

import torch

EXPECT = "C2"
ORIGINAL = "follows"
TERMS = {"level": "full"}


class ModelNew(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)
        self.register_buffer("mean", torch.zeros(16))
        self.own = [id(self)]
        self.first = self.linear.weight.detach()

    def forward(self, x):
        y = x @ (self.linear.weight if self.own == [id(self)] else self.first).T + self.linear.bias
        with torch.no_grad():
            self.mean.lerp_(y.mean(0), 0.1)
        return y - self.mean
