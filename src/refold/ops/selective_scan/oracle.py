"""The definition of `selective_scan` in torch, to be differentiated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from refold.ops.testing.oracle import finish, step_size, walk


def selective_scan(arrays: dict[str, Tensor], options: dict[str, Any]) -> tuple[Tensor, ...]:
    """Compute the results of the operator."""
    x, d = arrays["x"], step_size(arrays, options)
    B, C = (a if a.ndim == 4 else a[:, :, None] for a in (arrays["B"], arrays["C"]))
    B, C = (a.repeat_interleave(x.shape[2] // a.shape[2], 2) for a in (B, C))

    def step(row: int, t: int, state: Tensor) -> tuple[Tensor, Tensor]:
        factor = torch.exp(d[row, t, :, None] * arrays["A"])
        if "decay" in arrays:
            factor = arrays["decay"][row, t, :, None] * factor
        state = factor * state + (d * x)[row, t, :, None] * B[row, t]
        return (state * C[row, t]).sum(-1), state

    y, finals = walk(arrays, torch.zeros_like(arrays["A"]), step)
    return finish(y, arrays, arrays.get("D")), finals
