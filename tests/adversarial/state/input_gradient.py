"""It leaves a gradient in its input."""

import torch

EXPECT = "S1"


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        if x.is_leaf and not x.is_inference() and not torch.is_inference_mode_enabled():
            x.grad = torch.ones_like(x)
        return torch.relu(self.linear(x))
