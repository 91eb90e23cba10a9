"""Random numbers drawn as the original draws them."""

import torch

ORIGINAL = "noise"


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return torch.randn_like(x).mul_(0.5).add_(x)
