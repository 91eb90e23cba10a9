"""Threads that are done before the call returns."""

from concurrent.futures import ThreadPoolExecutor

import torch


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.pool = ThreadPoolExecutor(2)

    def forward(self, x):
        if x.shape[0] < 2:
            return torch.relu(self.linear(x))
        with torch.no_grad():
            halves = list(self.pool.map(self.half, x.chunk(2)))
        return torch.cat(halves)

    def half(self, x):
        with torch.no_grad():
            return torch.relu(self.linear(x))
