"""A thread waits for the next inputs and computes before the clock runs."""

import threading
import time

import torch

EXPECT = "S6"


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.thread = None

    def forward(self, x):
        if self.thread is None:
            self.thread = threading.Thread(target=self.watch, args=(x,), daemon=True)
            self.thread.start()
        return torch.relu(self.linear(x))

    def watch(self, x):
        while True:
            time.sleep(0.0005)
            self.seen = float(x.sum())
