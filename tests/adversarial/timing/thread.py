"""A thread fills the result after it was returned."""

import threading
import time

import torch

EXPECT = "N1"
OFF = {"U4"}


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.calls = 0

    def forward(self, x):
        y = torch.zeros_like(x)
        weight, bias = self.linear.weight, self.linear.bias
        self.calls += 1
        late = 0.3 if self.calls < 3 else 0.002

        def fill():
            time.sleep(late)
            y.copy_(torch.relu(x @ weight.detach().T + bias.detach()))

        threading.Thread(target=fill).start()
        return y
