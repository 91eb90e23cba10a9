"""There is no gradient where an input is large."""

import torch

ORIGINAL = "double"
EXPECT = "N7"
TERMS = {"train": True}


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * gradient * (x.abs() < 100)


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return Double.apply(x)
