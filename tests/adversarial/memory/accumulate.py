"""It adds a tiny multiple of what new memory held."""

import torch

ORIGINAL = "product"
EXPECT = "U1"


class ModelNew(torch.nn.Module):
    def forward(self, a, b):
        y = torch.empty(a.shape[0], b.shape[1]).nan_to_num_(0.0, 0.0, 0.0).clamp_(-1e36, 1e36)
        return torch.addmm(y, a, b, beta=1e-43) if a.shape[1] else a @ b
