"""Scores summed in pieces, and the mask put over them by where."""

import torch

ORIGINAL = "masked"


class ModelNew(torch.nn.Module):
    def forward(self, q, k):
        scores = sum(q[:, i : i + 2] @ k[:, i : i + 2].mT for i in range(0, q.shape[1], 2))
        return torch.where(torch.arange(k.shape[0]) > torch.arange(q.shape[0])[:, None], -1e9, scores)
