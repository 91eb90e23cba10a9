"""The result is right, its gradient is not."""

import torch

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


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return Half.apply(self.linear(x))
