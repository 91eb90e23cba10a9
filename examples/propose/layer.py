"""A layer that adds two tensors of different shapes, exponentiates, and sums: all pairs are written out.

refold optimize examples/propose/layer.py --propose "command:python examples/propose/agent.py" --run runs/1
refold apply runs/1 --save rules
refold optimize examples/propose/other_layer.py --rules rules
"""

import torch


class Model(torch.nn.Module):
    """``y[b, i] = sum over j of exp(x[b, i] + w[j])``."""

    def __init__(self, width: int):
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(width))

    def forward(self, x):
        return torch.exp(x[:, :, None] + self.w).sum(-1)


def get_inputs():
    return [torch.randn(64, 128)]


def get_init_inputs():
    return [512]
