"""Its backward reads the argument once more, which the caller may have overwritten by then."""

import torch

EXPECT = "C6"
ORIGINAL = "tanh"
TERMS = {"train": True}


class Tanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.x = x
        return torch.tanh(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1 - torch.tanh(ctx.x) ** 2)


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return Tanh.apply(x)
