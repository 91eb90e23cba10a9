"""Wrong from the five thousandth call on: a descriptor gives what an attribute is."""

import torch
from originals.layer import Model

EXPECT = "C7"


class Exact:
    def __get__(self, module, _):
        return max(0, 5000 - module.calls)

    def __set__(self, module, value):
        pass


class ModelNew(Model):
    exact = Exact()

    def __init__(self, width):
        super().__init__(width)
        self.calls = 0
        self.exact = True

    def forward(self, x):
        self.calls += 1
        y = torch.relu(self.linear(x))
        return y if self.exact else 2 * y
