"""Wrong for two inputs that overlap in memory."""

import torch

EXPECT = "C6"
ORIGINAL = "added"


class ModelNew(torch.nn.Module):
    def forward(self, a, b):
        near = 0 < abs(b.data_ptr() - a.data_ptr()) < 4 * a.numel()
        return (a + b) * (2 if near else 1)
