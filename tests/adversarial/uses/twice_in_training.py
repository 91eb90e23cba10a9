"""Its gradient is wrong where one tensor is given twice."""

import torch

EXPECT = "N7"
ORIGINAL = "three"
TERMS = {"train": True}


class ModelNew(torch.nn.Module):
    def forward(self, first, values, second):
        return ((first + second) if first is not second else 2 * first.detach() + 0 * first) @ values
