"""Its backward spoils what its forward kept, so a second one gives zeros."""

import torch

EXPECT = "N7"
TERMS = {"train": True, "level": "quick"}


class Relu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mask = (x > 0).to(x.dtype)
        return x.relu()

    @staticmethod
    def backward(ctx, gradient):
        mask = ctx.mask.clone()
        ctx.mask.zero_()
        return gradient * mask


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return Relu.apply(self.linear(x))
