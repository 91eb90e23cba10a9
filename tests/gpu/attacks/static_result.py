"""Return the same memory each time."""

import torch

EXPECT = ("S7", "U4", "C1", "N1")


class ModelNew(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(256, 512) / 512**0.5)
        self.y = None

    def forward(self, x):
        if self.y is None or self.y.shape[0] != x.shape[0]:
            self.y = torch.empty(x.shape[0], 256, device=x.device, dtype=x.dtype)
        self.y.copy_(torch.relu(x @ self.weight.T))
        return self.y
