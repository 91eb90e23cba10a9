"""It takes one shape, and says so."""

import torch


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        if x.shape != (8, 16):
            raise ValueError(f"made for inputs of shape (8, 16), not {tuple(x.shape)}")
        return torch.relu(self.linear(x))
