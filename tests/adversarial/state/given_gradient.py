"""Its backward works in the memory of the gradient that it is given."""

import torch
from originals.layer import Model

EXPECT = "S1"
OFF = set()
TERMS = {"train": True, "level": "quick"}


class Relu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x > 0)
        return x.relu()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return gradient.mul_(ctx.saved_tensors[0])


class ModelNew(Model):
    def forward(self, x):
        return Relu.apply(self.linear(x))
