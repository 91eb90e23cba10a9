"""Gradients of its weights are wrong if its input needs none."""

import torch
from originals.layer import Model

EXPECT = "N7"
TERMS = {"train": True, "level": "quick"}


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        needed = ctx.needs_input_grad[0]
        return gradient @ w if needed else None, gradient.t() @ x * (1 if needed else 0.5)


class ModelNew(Model):
    def forward(self, x):
        return torch.relu(Product.apply(x, self.linear.weight) + self.linear.bias)
