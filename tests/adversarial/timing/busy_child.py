"""A child process keeps a core busy, which slows the original down."""

import subprocess
import sys

import torch

EXPECT = "S6"


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.child = None

    def forward(self, x):
        if self.child is None:
            self.child = subprocess.Popen([sys.executable, "-I", "-c", "while True: pass"])
        return torch.relu(self.linear(x))
