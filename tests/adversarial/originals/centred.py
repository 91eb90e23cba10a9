"""Its mean is a running one."""

import torch


class Model(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x):
        self.mean.lerp_(x.mean(0).detach(), 0.1)
        return x - self.mean


def get_inputs():
    return [torch.randn(8, 16)]


def get_init_inputs():
    return [16]
