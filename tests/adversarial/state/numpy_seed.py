"""NumPy's random numbers start over."""

import numpy
import torch

EXPECT = "S3"
TERMS = {"level": "quick"}


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        numpy.random.seed(0)
        return torch.relu(self.linear(x))
