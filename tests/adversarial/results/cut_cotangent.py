"""What flows back is cut off where it is large, as it is where a loss is scaled."""

import torch

EXPECT = "N7"
ORIGINAL = "tanh"
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
        return g.clamp(-100, 100) * (1 - y * y)


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return Tanh.apply(x)
