"""Eight buffers hold the results of all calls."""

import torch

EXPECT = "S7"


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.buffers, self.next = [torch.empty(0)] * 8, 0

    def forward(self, x):
        self.next = (self.next + 1) % 8
        y = torch.relu(self.linear(x))
        if self.buffers[self.next].shape != y.shape:
            self.buffers[self.next] = torch.empty(y.shape)
        return self.buffers[self.next].detach().copy_(y.detach())
