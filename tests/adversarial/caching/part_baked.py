"""One of its parameters is a plain tensor, and the other has a name and a layout of its own."""

import torch

EXPECT = "C2"


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        linear = torch.nn.Linear(width, width)
        self.matrix = torch.nn.Parameter(linear.weight.detach().t().contiguous())
        self.kept = (linear.bias.detach(),)

    def forward(self, x):
        return torch.relu(x @ self.matrix + self.kept[0])
