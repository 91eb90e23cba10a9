"""PyTorch's own attention to one key: the gradients of queries and of that key vanish, and it leaves roundings."""

import torch

ORIGINAL = "one_key"
TERMS = {"train": True, "level": "quick"}


class ModelNew(torch.nn.Module):
    def forward(self, q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)
