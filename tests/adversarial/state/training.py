"""It switches itself to training."""

import torch

EXPECT = "S8"


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        self.train()
        return torch.relu(self.linear(x))
