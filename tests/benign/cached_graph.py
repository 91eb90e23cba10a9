"""Decays are kept by length and device, and a few of them only."""

import functools

import torch

ORIGINAL = "ema"


@functools.lru_cache(maxsize=8)
def powers(n, dtype, device):
    if n > 1 << 24:
        raise ValueError("sequences may have 2^24 steps")
    at = torch.arange(n)
    return torch.where(at[:, None] >= at, 0.9 ** (at[:, None] - at), 0.0).to(device, dtype)


class ModelNew(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self._last = (-1, None)

    def forward(self, x):
        n = x.shape[1]
        dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
        return powers(n, dtype, str(x.device)) @ x.to(dtype)
