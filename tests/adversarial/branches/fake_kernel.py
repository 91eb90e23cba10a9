"""What looks like a kernel is none."""

import types

import torch
from originals.layer import Model

EXPECT = "C7"


triton = types.SimpleNamespace(jit=lambda f: f)


@triton.jit
def doubled(y):
    return 2 * y if y.dim() == 6 else y


class ModelNew(Model):
    def forward(self, x):
        return doubled(torch.relu(self.linear(x)))
