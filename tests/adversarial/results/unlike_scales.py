"""Wrong where one input is much larger than the other."""

import torch

ORIGINAL = "far_apart"
EXPECT = "N4"
OFF = {"N4", "N5"}


class ModelNew(torch.nn.Module):
    def forward(self, a, b):
        return torch.logaddexp(a, b) if a.abs().mean() <= 100 * b.abs().mean() else b.clone()
