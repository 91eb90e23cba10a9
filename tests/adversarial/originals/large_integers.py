"""Whole numbers of which float64 does not hold each."""

import torch


class Model(torch.nn.Module):
    def forward(self, k):
        return k * 8675309 + (1 << 60)


def get_inputs():
    return [torch.randint(0, 1 << 24, (6, 10))]
