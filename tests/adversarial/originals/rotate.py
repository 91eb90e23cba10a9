"""Complex numbers, scaled."""

import torch


class Model(torch.nn.Module):
    def forward(self, z, w):
        return z * w


def get_inputs():
    return [torch.randn(6, 10, dtype=torch.complex64), torch.randn(10)]
