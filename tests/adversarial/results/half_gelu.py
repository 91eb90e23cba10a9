"""An elementwise function in half precision."""

import torch

ORIGINAL = "gelu"
EXPECT = "N1"
OFF = set()


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.gelu(x.half()).float()
