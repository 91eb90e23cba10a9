"""It spoils its input after it was used."""

import torch

EXPECT = "S1"


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        y = torch.relu(self.linear(x))
        x.zero_()
        return y
