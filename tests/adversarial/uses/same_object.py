"""It remembers its input, and does not see that the same object holds other numbers later."""

import torch

EXPECT = "C6"


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.kept = (None, None)

    def forward(self, x):
        if self.kept[0] is not x:
            self.kept = (x, torch.relu(self.linear(x)))
        return self.kept[1].clone()
