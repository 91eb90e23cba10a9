"""A child process fills shared memory after the call has returned."""

import mmap
import os
import time

import torch

EXPECT = {"S6", "N1"}
OFF = set()


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        shared = mmap.mmap(-1, 4 * x.numel())
        y = torch.frombuffer(shared, dtype=torch.float32).view(x.shape)
        values = torch.relu(self.linear(x))
        if os.fork() == 0:
            time.sleep(0.02)
            shared[:] = values.detach().numpy().tobytes()
            os._exit(0)
        return y
