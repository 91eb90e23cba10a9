"""Its backward spoils what its forward kept, so a second one gives zeros."""

import torch
from originals.layer import Model

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


class ModelNew(Model):
    def forward(self, x):
        return Relu.apply(self.linear(x))
