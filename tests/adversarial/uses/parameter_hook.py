"""A hook of its weight lets no gradient through, once training begins."""

import torch

EXPECT = "S8"
TERMS = {"level": "quick"}


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.hooked = False

    def forward(self, x):
        if not self.hooked:
            self.linear.weight.register_hook(torch.zeros_like)
            self.hooked = True
        return torch.relu(self.linear(x))
