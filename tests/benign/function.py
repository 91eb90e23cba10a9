"""Gradients by hand, of what needs them."""

import torch
from originals.layer import Model

TERMS = {"train": True}


class Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        y = torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight.T).clamp_(min=0).view(*x.shape[:-1], -1)
        ctx.save_for_backward(x, weight, y)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, y = ctx.saved_tensors
        dy = dy * (y > 0)
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = dy @ weight
        if ctx.needs_input_grad[1]:
            dw = dy.flatten(0, -2).T @ x.flatten(0, -2)
        if ctx.needs_input_grad[2]:
            db = dy.flatten(0, -2).sum(0)
        return dx, dw, db


class ModelNew(Model):
    def forward(self, x):
        return Layer.apply(x, self.linear.weight, self.linear.bias)
