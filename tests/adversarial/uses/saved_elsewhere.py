"""Its gradient is wrong if what it saves for the backward is kept elsewhere."""

import torch

EXPECT = "C6"
ORIGINAL = "tanh"
TERMS = {"train": True}


class Tanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        ctx.place = y.data_ptr()
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * (1 - y * y) * (1 if y.data_ptr() == ctx.place else 2)


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return Tanh.apply(x)
