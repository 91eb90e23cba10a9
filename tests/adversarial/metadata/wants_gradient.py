"""It records gradients where none are wanted."""

import torch

EXPECT = "M4"
TERMS = {"level": "quick"}


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    @torch.enable_grad()
    def forward(self, x):
        return torch.relu(self.linear(x))
