"""The definition of `gated_rmsnorm` in torch, to be differentiated."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def gated_rmsnorm(arrays: dict[str, Tensor], options: dict[str, Any]) -> tuple[Tensor, ...]:
    """Compute the results of the operator."""
    x, weight = arrays["x"], arrays["weight"]
    gate = F.silu(arrays["z"]) if "z" in arrays else torch.ones_like(x)
    v = x if options["norm_before_gate"] else x * gate
    groups = v.unflatten(-1, (-1, options["group_size"] or x.shape[-1]))
    normed = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + options["eps"])).flatten(-2) * weight
    return (normed * gate if options["norm_before_gate"] else normed,)
