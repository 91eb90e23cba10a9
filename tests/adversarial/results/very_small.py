"""Wrong for one range of small numbers."""

import torch

EXPECT = "N4"


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        y = torch.relu(self.linear(x))
        return 2 * y if 1e-6 < float(x.abs().max() if x.numel() else 0) < 5e-4 else y
