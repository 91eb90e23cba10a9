"""Its bias is not trained where its weight is not."""

import torch
from originals.layer import Model

EXPECT = "N7"
TERMS = {"train": True}


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        one = ctx.needs_input_grad[1] != ctx.needs_input_grad[2]
        return g @ weight, g.mT @ x, g.sum(0) * (0 if one else 1)


class ModelNew(Model):
    def forward(self, x):
        return torch.relu(Linear.apply(x, self.linear.weight, self.linear.bias))
