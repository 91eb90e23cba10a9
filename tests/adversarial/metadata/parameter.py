"""Its result is a parameter, which a module that keeps it would register."""

import torch

EXPECT = "M1"
TERMS = {"level": "quick"}


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return torch.nn.Parameter(torch.relu(self.linear(x)).detach(), requires_grad=False)
