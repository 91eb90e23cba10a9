"""Leave a row of the result as memory was."""

import torch

EXPECT = ("U1", "D1", "N1", "N4", "C1")


class ModelNew(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(256, 512) / 512**0.5)

    def forward(self, x):
        y = torch.empty(x.shape[0], 256, device=x.device, dtype=x.dtype)
        y[:-1] = torch.relu(x[:-1] @ self.weight.T)
        return y
