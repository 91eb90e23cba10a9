"""Another layer with the same region, spelled otherwise and of other sizes: the rule is found, and checked again."""

import torch


class Model(torch.nn.Module):
    """Attention with keys that do not depend on the query, up to its normalisation."""

    def __init__(self, width: int):
        super().__init__()
        self.keys = torch.nn.Parameter(torch.randn(width))

    def forward(self, x):
        pairs = x.unsqueeze(-1) + self.keys.view(1, 1, -1)
        return torch.log(pairs.exp().sum(dim=2, keepdim=True))


def get_inputs():
    return [torch.randn(48, 200)]


def get_init_inputs():
    return [300]
