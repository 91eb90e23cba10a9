"""It scales its weights a little with each call."""

import torch

EXPECT = "S1"
OFF = set()


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        y = torch.relu(self.linear(x))
        with torch.no_grad():
            self.linear.weight.mul_(1 + 2**-23)
        return y
