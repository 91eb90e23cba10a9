"""The gated RMS norm on torch, with its gradient by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from refold.ops.torch.pointwise import accumulator


def gated_rmsnorm(
    *, x: Tensor, z: Tensor | None, weight: Tensor, eps: float, group_size: int | None, norm_before_gate: bool
) -> Tensor:
    """Compute `refold.ops.gated_rmsnorm`."""
    dtype = accumulator(x.dtype)
    gate = None if z is None else F.silu(z.to(dtype))
    v = x.to(dtype)
    if gate is not None and not norm_before_gate:
        v = v * gate
    y = (v * _scale(v, eps, group_size)).mul_(weight.to(dtype))
    if gate is not None and norm_before_gate:
        y.mul_(gate)
    return y.to(x.dtype).contiguous()


def gated_rmsnorm_backward(
    *, dy: Tensor | None, needs: frozenset[str], x: Tensor, z: Tensor | None, weight: Tensor, eps: float,
    group_size: int | None, norm_before_gate: bool,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the gradients of all array arguments that are present, whatever ``needs`` says."""
    assert dy is not None, "y is the only result, so it has a gradient whenever the backward runs"
    dtype = accumulator(x.dtype)
    v, dout, w = x.to(dtype), dy.to(dtype), weight.to(dtype)
    grads = {}
    if z is not None:
        logistic = torch.sigmoid(z.to(dtype))
        gate = z.to(dtype) * logistic
        dgate_dz = logistic + gate * (1 - logistic)
        if norm_before_gate:
            grads["z"] = dout * v * _scale(v, eps, group_size) * w * dgate_dz
            dout = dout * gate
        else:
            v = v * gate
    scale = _scale(v, eps, group_size)
    normed, dnormed = v * scale, dout * w
    grads["weight"] = (dout * normed).flatten(0, -2).sum(0) if x.ndim > 1 else dout * normed
    # Within a group: d v = scale (dn - n mean(dn n)).
    groups = (x.shape[-1] // (group_size or x.shape[-1]), group_size or x.shape[-1])
    mean = (dnormed * normed).unflatten(-1, groups).mean(-1, keepdim=True).expand(*x.shape[:-1], *groups).flatten(-2)
    dv = scale * (dnormed - normed * mean)
    if z is not None and not norm_before_gate:
        grads["z"] = dv * x.to(dtype) * dgate_dz
        dv = dv * gate
    grads["x"] = dv
    return grads


def _scale(v: Tensor, eps: float, group_size: int | None) -> Tensor:
    """Return 1 / rms of the group of each channel, like ``v``."""
    size = group_size or v.shape[-1]
    groups = v.unflatten(-1, (v.shape[-1] // size, size))
    return torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps).expand_as(groups).flatten(-2)
