"""A subclass of Tensor, which may compute when it is looked at."""

import torch
from originals.layer import Model

EXPECT = "M1"


class Lazy(torch.Tensor):
    pass


class ModelNew(Model):
    def forward(self, x):
        return torch.relu(self.linear(x)).as_subclass(Lazy)
