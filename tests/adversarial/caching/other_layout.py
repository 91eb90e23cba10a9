"""It keeps its weights transposed, and computes with those that it had at first."""

import torch

EXPECT = "C2"
TERMS = {"level": "quick"}


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        linear = torch.nn.Linear(width, width)
        self.kernel = torch.nn.Parameter(linear.weight.detach().T.contiguous())
        self.offset = torch.nn.Parameter(linear.bias.detach().clone())
        self.first = None

    def forward(self, x):
        if self.first is None:
            self.first = self.kernel.detach().clone()
        return torch.relu(x @ self.first + self.offset)
