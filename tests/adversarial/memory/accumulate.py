"""What new memory held changes its last digit."""

import torch

ORIGINAL = "product"
EXPECT = "U1"


class ModelNew(torch.nn.Module):
    def forward(self, a, b):
        left = torch.empty(a.shape[0], b.shape[1]).nan_to_num_(0.0, 0.0, 0.0).clamp_(-1e30, 1e30)
        return (a @ b) * (1 + 1e-37 * left)
