"""A parametrized layer, which changes its buffers while it is trained."""

import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(16, 16))

    def forward(self, x):
        return torch.tanh(self.linear(x))


def get_inputs():
    return [torch.randn(6, 16)]
