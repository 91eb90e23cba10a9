"""Inputs by number, which are no text."""

import torch

ORIGINAL = "keyed"
TERMS = {"level": "quick"}


class ModelNew(torch.nn.Module):
    def forward(self, parts):
        return torch.add(parts[1], parts[0], alpha=2)
