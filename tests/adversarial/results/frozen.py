"""Gradients of its input are wrong if its weights need none."""

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
        return gradient @ w * (1 if ctx.needs_input_grad[1] else 0.5), gradient.t() @ x


class ModelNew(Model):
    def forward(self, x):
        return torch.relu(Product.apply(x, self.linear.weight) + self.linear.bias)
