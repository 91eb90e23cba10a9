"""The result is right when it is returned, and something else a little later."""

import threading
import time

import torch

EXPECT = {"U4", "N1", "S6"}
OFF = set()


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        y = torch.relu(self.linear(x))

        def spoil():
            time.sleep(0.01)
            y.zero_()

        threading.Thread(target=spoil).start()
        return y
