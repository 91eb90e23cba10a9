"""Sums in float32 for lower precision; a step of its own for few rows; contiguous where it must be."""

import torch
from originals.layer import Model


def is_low(x):
    return x.dtype in (torch.float16, torch.bfloat16)


class ModelNew(Model):
    def _small(self, x):
        return torch.nn.functional.linear(x, self.linear.weight, self.linear.bias).relu()

    def _large(self, x):
        flat = x.reshape(-1, x.shape[-1])
        if not flat.is_contiguous():
            flat = flat.contiguous()
        y = torch.addmm(self.linear.bias, flat, self.linear.weight.T)
        return y.clamp_min(0).reshape(x.shape)

    def forward(self, x):
        if torch.is_autocast_enabled() or is_low(x):
            return self._small(x)
        rows = x[..., 0].numel()
        run = self._small if rows < 4 else self._large
        return run(x)
