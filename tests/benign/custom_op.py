"""An operator of its own, and what tells its shapes."""

import torch
from originals.layer import Model

TERMS = {"level": "quick"}


@torch.library.custom_op("own::positive", mutates_args=())
def positive(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(min=0)


@positive.register_fake
def _(x):
    return torch.empty_like(x)


class ModelNew(Model):
    def forward(self, x):
        return torch.ops.own.positive(self.linear(x))
