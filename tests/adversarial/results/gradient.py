"""The result is right, its gradient is not."""

import torch
from originals.layer import Model

EXPECT = "N7"
OFF = {"C6", "N7"}
TERMS = {"train": True}


class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.relu(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return 0.999 * dy * (x > 0)


class ModelNew(Model):
    def forward(self, x):
        return Half.apply(self.linear(x))
