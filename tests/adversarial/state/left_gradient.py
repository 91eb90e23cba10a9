"""Its backward leaves a gradient in the parameter, which the next step of an optimizer would count twice."""

import torch
from originals.layer import Model

EXPECT = "S8"
OFF = {"S8", "N7"}
TERMS = {"train": True, "level": "quick"}


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        ctx.weight = weight
        return weight.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.weight.grad = gradient.clone()
        return gradient


class ModelNew(Model):
    def forward(self, x):
        return torch.relu(torch.nn.functional.linear(x, Twice.apply(self.linear.weight), self.linear.bias))
