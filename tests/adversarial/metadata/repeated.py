"""All columns are one."""

import torch

ORIGINAL = "rowmean"
EXPECT = "M3"


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return x.mean(-1, keepdim=True).expand(x.shape)
