"""Its backward works in the memory of the gradient that it is given."""

import torch

EXPECT = "S1"
OFF = set()
TERMS = {"train": True, "level": "quick"}


class Relu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x > 0)
        return x.relu()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return gradient.mul_(ctx.saved_tensors[0])


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return Relu.apply(self.linear(x))
