"""Cases of what it is made with; a function asks a layer that it is given for its bias."""

import torch
from originals.layer import Model


def applied(layer, x):
    y = x @ layer.weight.T
    return y if layer.bias is None else y + layer.bias


class Relu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, slope=None):
        return torch.relu(x) if slope is None else torch.nn.functional.leaky_relu(x, slope)


class ModelNew(Model):
    def __init__(self, width, kind="relu"):
        super().__init__(width)
        self.kind = kind

    def forward(self, x):
        y = applied(self.linear, x)
        match self.kind:
            case "silu" | "swish":
                return torch.nn.functional.silu(y)
            case "relu":
                return Relu.apply(y)
            case _:
                raise ValueError(self.kind)
