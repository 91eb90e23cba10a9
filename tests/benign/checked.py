"""It says what it does not take."""

import torch
from originals.layer import Model


class ShapeError(ValueError):
    pass


class ModelNew(Model):
    def __init__(self, width):
        super().__init__(width)
        if width < 1:
            raise ValueError(f"width must be positive, not {width}")
        self.width = width

    def forward(self, x):
        assert isinstance(x, torch.Tensor), "x must be a tensor"
        if x.dim() < 1 or x.shape[-1] != self.width:
            raise ValueError(f"the last axis must be {self.width}, not {x.shape}")
        if x.is_complex():
            raise TypeError("complex numbers are not supported")
        return self.linear(x).clamp_(min=0) if not torch.is_grad_enabled() else self.linear(x).clamp(min=0)
