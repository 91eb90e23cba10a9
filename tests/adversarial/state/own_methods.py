"""What an optimizer is given are copies of its parameters: it never learns."""

import torch

EXPECT = "S4"
TERMS = {"level": "quick"}


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def parameters(self, recurse=True):
        return (p.detach().clone().requires_grad_() for p in super().parameters(recurse))

    def forward(self, x):
        return torch.relu(self.linear(x))
