"""What its backward needs lies in memory that each call uses again."""

import torch

EXPECT = "C6"
ORIGINAL = "cube"
TERMS = {"train": True}
SCRATCH = {}


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.square = SCRATCH.setdefault((x.shape, x.dtype), torch.empty(x.shape, dtype=x.dtype)).copy_(x * x)
        return ctx.square * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return 3 * gradient * ctx.square


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return Cube.apply(x)
