"""Where the original in float64 has another whole number, any will do."""

import torch

ORIGINAL = "whole"
EXPECT = "N1"
OFF = set()


class ModelNew(torch.nn.Module):
    def forward(self, x):
        y = (x * 3e8).long()
        return torch.where((x.double() * 3e8).long() == y, y, 0)
