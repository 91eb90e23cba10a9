"""Threads race: not the same bits each time."""

import os

import torch

EXPECT = "D1"


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        y = torch.relu(self.linear(x))
        return y * (1 + 1e-7 * int.from_bytes(os.urandom(1), "little") / 255)
