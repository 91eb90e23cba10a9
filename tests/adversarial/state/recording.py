"""After it, no gradients are recorded."""

import torch

EXPECT = "S1"
TERMS = {"level": "quick"}


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        y = torch.relu(self.linear(x))
        torch.autograd.grad_mode.set_grad_enabled(False)
        return y
