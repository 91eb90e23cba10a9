"""Wrong where each row has one number that is not zero."""

import torch

EXPECT = "N4"


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        y = torch.relu(self.linear(x))
        return 2 * y if x.numel() > 0 and x.dim() == 2 and bool(((x != 0).sum(-1) == 1).all()) else y
