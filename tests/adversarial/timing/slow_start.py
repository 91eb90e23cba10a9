"""Slow, and slower at first, so that a benchmark that adapts takes few samples."""

import time

import torch

EXPECT = "T7"
TERMS = {"accept": "faster"}


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls < 5:
            time.sleep(0.01)
        for _ in range(20):
            y = torch.relu(self.linear(x))
        return y
