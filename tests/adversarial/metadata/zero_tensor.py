"""A tensor of zeros without memory."""

import torch

EXPECT = "M1"
OFF = set()


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return torch._efficientzerotensor(x.shape)
