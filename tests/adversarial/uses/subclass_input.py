"""Wrong for an input of a subclass of tensors."""

import torch

EXPECT = "C6"


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        y = torch.relu(self.linear(x))
        return 2 * y if type(x) not in (torch.Tensor, torch.nn.Parameter) else y
