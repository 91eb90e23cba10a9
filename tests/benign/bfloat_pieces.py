"""A product of float32 values cut into three bfloat16 pieces each, as exact as float32."""

import torch

ORIGINAL = "product"


def pieces(x):
    out = []
    for _ in range(3):
        out.append(x.bfloat16().float())
        x = x - out[-1]
    return out


class ModelNew(torch.nn.Module):
    def forward(self, a, b):
        left, right = pieces(a), pieces(b)
        return sum(left[i] @ right[j] for i, j in ((2, 0), (1, 1), (0, 2), (1, 0), (0, 1), (0, 0)))
