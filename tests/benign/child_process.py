"""A child process that has ended before the call returns."""

import subprocess
import sys

import torch


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.slope = float(subprocess.run([sys.executable, "-I", "-c", "print(0)"], capture_output=True).stdout)

    def forward(self, x):
        return torch.nn.functional.leaky_relu(self.linear(x), self.slope)
