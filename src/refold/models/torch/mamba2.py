"""The mixer of Mamba-2: ``out_proj(norm(ssd(conv(in_proj(u)))), gate)``."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from refold import ops
from refold.models.configs import Mixer2Config
from refold.models.torch import steps
from refold.models.torch.heads import enter, leave
from refold.models.torch.layers import Tree, linear, wide


def mixer(
    c: Mixer2Config, weights: Tree, u: Tensor, window: Tensor, ssm: Tensor, offsets: Tensor | None,
    chunk_size: int | None = None, group: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Mix ``u (b, t, d)`` over time; return it with the last inputs of the convolution and the state."""
    u, weights = enter(c.heads, u, weights)
    projected = linear(u, weights["in_proj"], weights.get("in_bias"))
    z, xBC, dt = projected.split([c.d_inner, c.conv_dim, c.nheads], -1)
    xBC, window = ops.causal_conv1d(
        xBC, weights["conv_weight"], weights.get("conv_bias"), activation="silu", initial_state=window,
        cu_seqlens=offsets, group=group,
    )  # fmt: skip
    x, B, C = _heads(c, xBC)
    y, ssm = ops.ssd(
        x, dt, -weights["A_log"].exp(), B, C, D=weights["D"], dt_bias=weights["dt_bias"], dt_softplus=True,
        dt_limit=c.dt_limit, initial_state=ssm, cu_seqlens=offsets, chunk_size=chunk_size, state_dtype=ssm.dtype,
        group=group,
    )  # fmt: skip
    y = y.flatten(-2)
    if c.heads is None or c.heads.norm is None:
        group_size = c.d_inner // c.norm_groups
        y = ops.gated_rmsnorm(y, z, weights["gated_norm"], eps=c.norm_eps, group_size=group_size)
    else:
        y = c.heads.norm(y * F.silu(z.to(wide(z.dtype))), weights["gated_norm"], c.norm_eps)
    return leave(c.heads, y, weights["out_proj"], weights.get("out_bias")), window, ssm


def mixer_step_(
    c: Mixer2Config, weights: Tree, hidden: Tensor, norm: Tensor, eps: float, window: Tensor, ssm: Tensor,
    active: Tensor | None, scale: float = 1.0,
) -> None:  # fmt: skip
    """Add ``scale`` times the mixer of the normalised ``hidden (b, d)`` to ``hidden``, and move its states on."""
    projected = steps.project_and_convolve_(
        hidden, weights["in_proj"], weights.get("in_bias"), norm=norm, eps=eps, window=window,
        taps=weights["conv_weight"], taps_bias=weights.get("conv_bias"), first=c.d_inner, active=active,
    )  # fmt: skip
    z, xBC, dt = projected.split([c.d_inner, c.conv_dim, c.nheads], -1)
    y = steps.ssd_(
        *_heads(c, xBC), dt, z.unflatten(-1, (c.nheads, c.headdim)), weights["A_log"], weights["D"],
        weights["dt_bias"], c.dt_limit, ssm, active,
    )  # fmt: skip
    y, weight = y.flatten(-2), weights["gated_norm"]
    if c.heads is not None and c.heads.norm is not None:
        y, weight = c.heads.norm(y, weight, c.norm_eps), None
    steps.add_projected_(
        hidden, y, weights["out_proj"], weights.get("out_bias"), norm=weight, eps=c.norm_eps,
        group_size=c.d_inner // c.norm_groups, scale=scale, heads=c.heads,
    )  # fmt: skip


def _heads(c: Mixer2Config, xBC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split the convolution's result: x by heads, B and C by groups."""
    x, B, C = xBC.split([c.d_inner, c.ngroups * c.dstate, c.ngroups * c.dstate], -1)
    groups = (c.ngroups, c.dstate)
    return x.unflatten(-1, (c.nheads, c.headdim)), B.unflatten(-1, groups), C.unflatten(-1, groups)
