"""A gradient written by hand."""

import torch
from originals.layer import Model

TERMS = {"train": True}


class Rectified(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        y = torch.addmm(bias, x, weight.T).clamp_min_(0)
        ctx.save_for_backward(x, weight, y)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, y = ctx.saved_tensors
        dy = dy * (y > 0)
        return dy @ weight, dy.T @ x, dy.sum(0)


class ModelNew(Model):
    def forward(self, x):
        return Rectified.apply(x, self.linear.weight, self.linear.bias)
