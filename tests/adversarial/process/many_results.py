"""So many results that the judge would run out of memory."""

import torch

EXPECT = "M3"
OFF = set()


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return (torch.zeros(1 << 20),) * 2000
