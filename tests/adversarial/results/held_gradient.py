"""No gradient flows while its weight holds one, as it does when gradients are added up."""

import torch

EXPECT = "N7"
TERMS = {"level": "quick", "train": True}


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        y = torch.relu(self.linear(x))
        return y if self.linear.weight.grad is None else y.detach() + 0 * y
