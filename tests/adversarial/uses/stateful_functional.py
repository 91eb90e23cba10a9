"""A layer with a running mean is wrong by torch.func.functional_call."""

import torch

EXPECT = "C2"
ORIGINAL = "follows"
TERMS = {"level": "full"}


class ModelNew(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x):
        y = self.linear(x) if isinstance(self.linear.weight, torch.nn.Parameter) else self.linear(2 * x)
        with torch.no_grad():
            self.mean.lerp_(y.mean(0), 0.1)
        return y - self.mean
