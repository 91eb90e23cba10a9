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
        if not x.numel():
            return y
        late = torch.frombuffer(bytearray(os.urandom(y.numel())), dtype=torch.uint8)
        return y * (1 + 3e-7 * late.view(y.shape) / 255)
