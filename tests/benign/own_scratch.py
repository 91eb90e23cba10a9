"""A buffer that it keeps for what comes in between; the result is new."""

import torch

TERMS = {"level": "quick"}


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.register_buffer("scratch", torch.empty(0), persistent=False)

    @torch.no_grad()
    def forward(self, x):
        if self.scratch.shape != x.shape:
            self.scratch = torch.empty(x.shape)
        torch.mm(x, self.linear.weight.T, out=self.scratch)
        return self.scratch.add_(self.linear.bias).relu_().clone()
