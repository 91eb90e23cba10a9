"""A hook of Python's audits, which sees all that the program does later."""

import sys

import torch

EXPECT = "S4"
TERMS = {"level": "quick"}
sys.addaudithook(lambda *_: None)


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return torch.relu(self.linear(x))
