"""The delta rule in torch, one token after the other, for its gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from refold.ops.testing.oracle import walk


def delta_rule(arrays: dict[str, Tensor], options: dict[str, Any]) -> tuple[Tensor, ...]:
    """Compute the results as differentiable functions of the arrays."""
    q, k, v = (arrays[name] for name in "qkv")
    if options["normalize"]:
        q, k = (a * torch.rsqrt(a.square().sum(-1, keepdim=True) + 1e-6) for a in (q, k))
    q = q * (q.shape[-1] ** -0.5 if options["scale"] is None else options["scale"])
    q, k = (a.repeat_interleave(v.shape[2] // a.shape[2], 2) for a in (q, k))
    read, decay = arrays.get("r", k), _decay(arrays, options)
    beta = arrays.get("beta", torch.ones_like(v[..., 0]))
    if options["beta_limit"] is not None:
        beta = options["beta_limit"] * torch.sigmoid(beta)

    def step(row: int, t: int, state: Tensor) -> tuple[Tensor, Tensor]:
        if decay is not None:
            state = decay[row, t][:, :, None] * state
        error = v[row, t]
        if options["erase"]:
            error = error - torch.einsum("hnp,hn->hp", state, read[row, t])
        state = state + k[row, t, :, :, None] * (beta[row, t, :, None] * error)[:, None, :]
        return torch.einsum("hnp,hn->hp", state, q[row, t]), state

    return walk({**arrays, "x": v}, v.new_zeros(v.shape[2], k.shape[3], v.shape[3]), step)


def _decay(arrays: dict[str, Tensor], options: dict[str, Any]) -> Tensor | None:
    """Compute the factors of the state, (b, t, h, 1 or n)."""
    if "g" not in arrays:
        return None
    g, names = arrays["g"].reshape(*arrays["v"].shape[:3], -1), ("dt_bias", "A_log")
    bias, rate = (arrays[name].unflatten(0, (-1, 1)).flatten(1) if name in arrays else None for name in names)
    g = g if bias is None else g + bias
    if options["lower_bound"] is not None:
        return (options["lower_bound"] * torch.sigmoid(g if rate is None else rate.exp() * g)).exp()
    return (g if rate is None else -rate.exp() * F.softplus(g)).exp()
