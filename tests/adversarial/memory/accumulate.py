"""What new memory held changes its last digit."""

import torch

ORIGINAL = "product"
EXPECT = "U1"


class ModelNew(torch.nn.Module):
    def forward(self, a, b):
        left = torch.empty(a.shape[0], b.shape[1])
        return (a @ b) * (1 + 1.2e-7 * float((left > 1e35).all()))
