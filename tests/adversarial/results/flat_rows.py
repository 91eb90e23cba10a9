"""Wrong where all columns are one in memory."""

import torch

EXPECT = "N6"


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        y = torch.relu(self.linear(x))
        return 2 * y if x.dim() == 2 and x.shape[1] > 1 and x.stride(1) == 0 else y
