"""A normalised layer and its spread."""

import torch


class Model(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 2 * width)
        self.down = torch.nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x)))), x.var(-1)


def get_inputs():
    return [torch.randn(4, 5, 16)]


def get_init_inputs():
    return [16]
