"""Reads its input as if it were contiguous."""

import torch

EXPECT = "N6"


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        flat = x.as_strided((x.numel(),), (1,)) if x.untyped_storage().nbytes() >= 4 * x.numel() else x.reshape(-1)
        return torch.relu(self.linear(flat.view(x.shape)))
