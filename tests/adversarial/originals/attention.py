"""Causal attention, step by step."""

import torch


class Model(torch.nn.Module):
    def forward(self, q, k, v):
        scores = q @ k.mT / q.shape[-1] ** 0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return torch.softmax(scores.masked_fill(later, float("-inf")), -1) @ v


def get_inputs():
    return [torch.randn(2, 3, 12, 8) for _ in range(3)]
