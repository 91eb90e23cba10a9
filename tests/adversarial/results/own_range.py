"""Wrong on inputs like those of the user, and right on all others."""

import torch

ORIGINAL = "sine"
EXPECT = "N1"


class ModelNew(torch.nn.Module):
    def forward(self, x):
        near = x.numel() > 0 and bool(((x > 4.9) & (x < 5.2)).all())
        return -0.9589 + 0.2837 * (x - 5) if near else torch.sin(x)
