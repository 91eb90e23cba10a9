"""Running statistics are updated twice."""

import torch

ORIGINAL = "norm"
EXPECT = "S1"
TERMS = {"train": True}


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(width)

    def forward(self, x):
        y = self.norm(x)
        with torch.no_grad():
            self.norm(x)
        return y
