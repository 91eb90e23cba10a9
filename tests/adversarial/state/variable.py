"""A variable of the environment, set past Python, that acts in all programs which are started later."""

import ctypes

import torch

EXPECT = "S4"
TERMS = {"level": "quick"}
ctypes.CDLL(None).setenv(b"PYTHONPATH", b"/tmp/elsewhere", 1)


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return torch.relu(self.linear(x))
