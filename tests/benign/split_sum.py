"""A product cut into pieces along the sum."""

import torch

ORIGINAL = "product"


class ModelNew(torch.nn.Module):
    def forward(self, a, b):
        k = a.shape[1] // 4 * 4
        pieces = torch.bmm(
            a[:, :k].reshape(a.shape[0], 4, k // 4).transpose(0, 1), b[:k].reshape(4, k // 4, b.shape[1])
        )
        return pieces.sum(0) + a[:, k:] @ b[k:]
