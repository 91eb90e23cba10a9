"""Its forward-mode derivative is wrong."""

import torch

EXPECT = "C6"
ORIGINAL = "tanh"
TERMS = {"train": True}


class Tanh(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return torch.tanh(x)

    @staticmethod
    def setup_context(ctx, inputs, y):
        ctx.save_for_backward(y)
        ctx.save_for_forward(y)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1 - ctx.saved_tensors[0] ** 2)

    @staticmethod
    def jvp(ctx, tangent):
        return tangent * (1 + ctx.saved_tensors[0] ** 2)


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return Tanh.apply(x)
