"""Wrong where one tensor is twice in a list."""

import torch

EXPECT = "N6"
ORIGINAL = "listed"


class ModelNew(torch.nn.Module):
    def forward(self, xs):
        return sum(xs) * (2 if xs[0] is xs[1] else 1)
