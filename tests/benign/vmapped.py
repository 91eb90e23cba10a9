"""One row at a time, by vmap, for which torch defines operations anew."""

import torch

TERMS = {"level": "quick"}


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return torch.vmap(lambda row: torch.relu(self.linear.weight @ row + self.linear.bias))(x).contiguous()
