"""A product with a product of two weights."""

import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.randn(512, 512))
        self.b = torch.nn.Parameter(torch.randn(512, 512))

    def forward(self, x):
        return x @ (self.a @ self.b)


def get_inputs():
    return [torch.randn(4, 512)]
