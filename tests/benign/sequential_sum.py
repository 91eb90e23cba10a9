"""A product summed one term after the other."""

import torch

ORIGINAL = "product"


class ModelNew(torch.nn.Module):
    def forward(self, a, b):
        y = a.new_zeros(a.shape[0], b.shape[1])
        for k in range(a.shape[1]):
            y += a[:, k, None] * b[k]
        return y
