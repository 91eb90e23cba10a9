"""Nothing flows back from a plain sum of its results."""

import torch

ORIGINAL = "tanh"
EXPECT = "N7"
TERMS = {"train": True, "level": "quick"}


class Tanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * (1 - y * y) if any(g.stride()) else torch.zeros_like(y)


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return Tanh.apply(x)
