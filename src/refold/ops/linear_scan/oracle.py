"""The definition of `linear_scan` in torch, to be differentiated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from refold.ops.testing.oracle import walk


def linear_scan(arrays: dict[str, Tensor], options: dict[str, Any]) -> tuple[Tensor, ...]:
    """Compute the results of the operator."""

    def step(row: int, t: int, state: Tensor) -> tuple[Tensor, Tensor]:
        factor = arrays["a"][row, t]
        if "reset" in arrays:  # before the product, so that neither has a gradient there
            factor, state = (torch.where(arrays["reset"][row, t], 0.0, v) for v in (factor, state))
        state = factor * state + arrays["x"][row, t]
        return state, state

    return walk(arrays, torch.zeros_like(arrays["x"][0, 0]), step, options["reverse"])
