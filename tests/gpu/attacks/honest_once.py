"""Do once what need not be done again."""

import torch

EXPECT = "accepted"
TERMS = {"accept": "faster", "level": "quick"}


class ModelNew(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(256, 512) / 512**0.5)

    def forward(self, x):
        return torch.relu(x @ self.weight.T)
