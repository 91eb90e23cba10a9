"""The definition of `causal_conv1d` in torch, to be differentiated."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from refold.ops.testing.oracle import walk


def causal_conv1d(arrays: dict[str, Tensor], options: dict[str, Any]) -> tuple[Tensor, ...]:
    """Compute the results of the operator."""
    x, weight = arrays["x"], arrays["weight"]

    def step(row: int, t: int, state: Tensor) -> tuple[Tensor, Tensor]:
        window = torch.cat([state, x[row, t, :, None]], 1)
        return (window * weight).sum(1), window[:, 1:]

    y, finals = walk(arrays, x.new_zeros(x.shape[2], weight.shape[1] - 1), step)
    y = y + arrays["bias"] if "bias" in arrays else y
    return F.silu(y) if options["activation"] == "silu" else y, finals
