"""It seeds the random state, so that what comes next repeats."""

import torch

EXPECT = "S3"


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        torch.manual_seed(0)
        return torch.relu(self.linear(x))
