"""A hook on its result changes the gradient that its caller asks for there, and none before it."""

import torch
from originals.softplus import Model

EXPECT = "M1"
TERMS = {"train": True}


class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, g):
        return g / 2


class ModelNew(Model):
    def forward(self, x):
        y = Half.apply(torch.nn.functional.softplus(x))
        if y.requires_grad:
            y.register_hook(lambda g: 2 * g)
        return y
