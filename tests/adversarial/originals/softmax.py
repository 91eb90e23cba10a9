"""Softmax of long rows: small, nearly equal numbers."""

import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.softmax(0.01 * x, -1)


def get_inputs():
    return [torch.randn(4, 512)]
