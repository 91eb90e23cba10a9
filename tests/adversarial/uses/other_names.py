"""Its parameters have the original's names in another order, so that a call by keywords means something else."""

import torch

EXPECT = "C6"
ORIGINAL = "follows_names"


class ModelNew(torch.nn.Module):
    def forward(self, b, a):
        return b - 2 * a
