"""A child process stays, asleep, for a later phase."""

import os
import time

import torch

EXPECT = "S6"


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.forked = False

    def forward(self, x):
        if not self.forked:
            self.forked = True
            if os.fork() == 0:
                time.sleep(30)
                os._exit(0)
        return torch.relu(self.linear(x))
