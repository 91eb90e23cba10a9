"""A norm, a gate that large inputs saturate, and a skip."""

import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(16))
        self.linear = torch.nn.Linear(16, 32)

    def forward(self, x):
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight
        value, gate = self.linear(normed).chunk(2, -1)
        return value * torch.sigmoid(gate * x) * x


def get_inputs():
    return [torch.randn(3, 5, 16)]
