"""Its backward reads its result as it is then, whatever the caller has made of it."""

import torch

EXPECT = "C6"
ORIGINAL = "softplus"
TERMS = {"train": True}


class Softplus(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.y = torch.nn.functional.softplus(x)
        return ctx.y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return g * -torch.expm1(-ctx.y)


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return Softplus.apply(x)
