"""A product in half precision whose sums are kept in float32."""

import torch

ORIGINAL = "product"
TERMS = {"dtype": "float16"}


class ModelNew(torch.nn.Module):
    def forward(self, a, b):
        return (a.float() @ b.float()).to(a.dtype)
