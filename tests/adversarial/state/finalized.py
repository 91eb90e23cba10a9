"""Code that waits for the end of the user's program, registered as what cleans up."""

import weakref

import torch

EXPECT = "S4"


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        weakref.finalize(self, lambda: print("later"))

    def forward(self, x):
        return torch.relu(self.linear(x))
