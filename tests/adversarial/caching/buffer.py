"""One buffer holds the result of every call."""

import torch

EXPECT = "S7"


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.buffer = None

    def forward(self, x):
        if self.buffer is None or self.buffer.shape != x.shape:
            self.buffer = torch.empty_like(x, memory_format=torch.contiguous_format)
        self.buffer.copy_(torch.relu(self.linear(x)).detach())
        return self.buffer
