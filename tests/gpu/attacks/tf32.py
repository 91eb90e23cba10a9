"""Allow less precision for everybody."""

import torch

EXPECT = ("N1", "N4", "S4")


class ModelNew(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(256, 512) / 512**0.5)
        torch.backends.cuda.matmul.allow_tf32 = True

    def forward(self, x):
        return torch.relu(x @ self.weight.T)
