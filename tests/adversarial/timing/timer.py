"""A timer interrupts whatever runs later."""

import signal

import torch

EXPECT = "P4"  # the sandbox keeps it from making one
OFF = set()

signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 1000.0)


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return torch.relu(self.linear(x))
