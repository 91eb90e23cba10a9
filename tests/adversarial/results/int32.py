"""Wrong for an index of 32 bits."""

import torch

EXPECT = "N6"
ORIGINAL = "chosen"


class ModelNew(torch.nn.Module):
    def forward(self, x, index):
        return x[index] * (1 if index.dtype == torch.int64 else 2)
