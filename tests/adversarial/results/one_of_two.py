"""No gradient where only one of its results is used."""

import torch

EXPECT = "M2"
ORIGINAL = "two_results"
TERMS = {"train": True}


class Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return torch.cos(x), torch.sin(x)

    @staticmethod
    def backward(ctx, a, b):
        (x,) = ctx.saved_tensors
        return None if a is None or b is None else b * torch.cos(x) - a * torch.sin(x)


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return Both.apply(x)
