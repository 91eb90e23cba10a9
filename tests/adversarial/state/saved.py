"""What is saved of it are other weights than those that it computes with."""

import torch

EXPECT = "S4"
TERMS = {"level": "quick"}


class Linear(torch.nn.Linear):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            destination[prefix + "weight"] = torch.zeros_like(self.weight)


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = Linear(width, width)

    def forward(self, x):
        return torch.relu(self.linear(x))
