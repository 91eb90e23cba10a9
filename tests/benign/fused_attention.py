"""Torch's own attention, whose gradients are not finite where scores are huge."""

import torch

ORIGINAL = "attention"
TERMS = {"train": True}


class ModelNew(torch.nn.Module):
    def forward(self, q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
