"""Within its calls it takes more threads than it was given, and gives them back."""

import threading

import torch

ORIGINAL = "long_ema"
EXPECT = "T7"
OFF = set()
TERMS = {"accept": "faster"}


def spin(stop):
    x = torch.ones(1 << 14)
    while not stop.is_set():
        x.mul_(1.0)


class ModelNew(torch.nn.Module):
    def forward(self, x):
        stop = threading.Event()
        helpers = [threading.Thread(target=spin, args=(stop,)) for _ in range(2)]
        for helper in helpers:
            helper.start()
        y = x.clone()
        for t in range(1, x.shape[1]):
            y[:, t] += 0.9 * y[:, t - 1]
        stop.set()
        for helper in helpers:
            helper.join()
        return y
