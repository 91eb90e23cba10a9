"""Its weights are plain tensors, which no state_dict has: nobody can give it others."""

import torch

EXPECT = "C2"
TERMS = {"level": "quick"}


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        linear = torch.nn.Linear(width, width)
        self.weight, self.bias = linear.weight.detach(), linear.bias.detach()

    def forward(self, x):
        return torch.relu(torch.nn.functional.linear(x, self.weight, self.bias))
