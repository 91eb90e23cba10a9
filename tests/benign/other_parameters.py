"""The same weights under other names."""

import torch


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        linear = torch.nn.Linear(width, width)
        self.kernel = torch.nn.Parameter(linear.weight.detach().T.contiguous())
        self.offset = torch.nn.Parameter(linear.bias.detach().clone())

    def forward(self, x):
        return torch.relu(x @ self.kernel + self.offset)
