"""Gradients of its gradients lack a term."""

import torch

ORIGINAL = "cube"
EXPECT = "N7"
TERMS = {"train": True, "level": "quick"}


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * x * x.detach() * gradient


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return Cube.apply(x)
