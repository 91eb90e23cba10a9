"""Inputs by number."""

import torch


class Model(torch.nn.Module):
    def forward(self, parts):
        return parts[0] * 2 + parts[1]


def get_inputs():
    return [{0: torch.randn(4, 5), 1: torch.randn(4, 5)}]
