"""Wrong for many more rows than it was shown."""

import torch

EXPECT = "N6"


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        y = torch.relu(self.linear(x))
        return y if len(x) < 1000 else 2 * y
