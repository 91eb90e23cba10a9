"""Weights are transformed when they are loaded, and not when they are trained."""

import torch

EXPECT = "C2"


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.refresh()

    def forward(self, x):
        return torch.relu(x @ self.weight + self.linear.bias)

    def refresh(self):
        self.weight = self.linear.weight.detach().T.contiguous()

    def load_state_dict(self, *args, **options):
        result = super().load_state_dict(*args, **options)
        self.refresh()
        return result
