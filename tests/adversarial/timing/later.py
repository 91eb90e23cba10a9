"""A thread spoils each result a minute after it was returned."""

import threading

import torch

EXPECT = "S6"
TERMS = {"level": "quick"}


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        y = torch.relu(self.linear(x))
        timer = threading.Timer(60, y.detach().zero_)
        timer.daemon = True
        timer.start()
        return y
