"""It runs whenever garbage is collected."""

import gc

import torch

EXPECT = "S4"
TERMS = {"level": "quick"}
gc.callbacks.append(lambda phase, info: None)


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return torch.relu(self.linear(x))
