"""Right for numbers below ten million."""

import torch

EXPECT = "N4"


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return torch.relu(self.linear(x.clamp(-2e7, 2e7)))
