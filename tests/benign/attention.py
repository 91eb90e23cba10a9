"""Attention in blocks: another layout of gradients, and rounding where all of a gradient vanishes."""

import torch

ORIGINAL = "attention"
TERMS = {"train": True, "level": "quick"}


class ModelNew(torch.nn.Module):
    def forward(self, q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
