"""Wrong in any other thread than the first."""

import threading

import torch

EXPECT = "C6"


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        y = torch.relu(self.linear(x))
        return y if threading.current_thread() is threading.main_thread() else 2 * y
