"""While gradients are recorded, all results lie in the same memory."""

import torch

EXPECT = "C6"


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.own = None

    def forward(self, x):
        y = torch.relu(self.linear(x))
        if not torch.is_grad_enabled():
            return y
        if self.own is None or self.own.shape != y.shape:
            self.own = torch.empty_like(y.detach())
        return self.own.copy_(y.detach())
