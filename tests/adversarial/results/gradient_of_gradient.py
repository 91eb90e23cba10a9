"""Its gradient does not depend on what flows back, as far as autograd sees."""

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
        return 3 * x * x * gradient.detach()


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return Cube.apply(x)
