"""The gated delta rule of Qwen3.5 as the mixer of a hybrid model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from refold import ops
from refold.models.configs import DeltaConfig
from refold.models.torch import steps
from refold.models.torch.heads import enter, leave
from refold.models.torch.layers import Tree, linear


def mixer(
    c: DeltaConfig, weights: Tree, u: Tensor, window: Tensor, state: Tensor, offsets: Tensor | None,
    chunk_size: int | None = None, group: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Mix ``u (b, t, d)`` over time; return it with the last inputs of the convolution and the state."""
    u, weights = enter(c.heads, u, weights)
    z, qkv, b, a = _parts(c, linear(u, weights["in_proj"]))
    qkv, window = ops.causal_conv1d(
        qkv, weights["conv_weight"], activation="silu", initial_state=window, cu_seqlens=offsets, group=group
    )
    y, after = ops.delta_rule(
        *_heads(c, qkv), g=a, beta=b, A_log=weights["A_log"], dt_bias=weights["dt_bias"], normalize=True,
        beta_limit=1.0, initial_state=state, cu_seqlens=offsets, chunk_size=chunk_size, group=group,
    )  # fmt: skip
    return leave(c.heads, _gated(c, weights, y, z), weights["out_proj"]), window, after.to(state.dtype)


def mixer_step_(
    c: DeltaConfig, weights: Tree, hidden: Tensor, norm: Tensor, eps: float, window: Tensor, state: Tensor,
    active: Tensor | None, scale: float = 1.0,
) -> None:  # fmt: skip
    """Add ``scale`` times the mixer of the normalised ``hidden (b, d)`` to ``hidden``, and move its states on."""
    projected = steps.project_and_convolve_(
        hidden, weights["in_proj"], None, norm=norm, eps=eps, window=window, taps=weights["conv_weight"],
        taps_bias=None, first=c.d_inner, active=active,
    )  # fmt: skip
    z, qkv, b, a = _parts(c, projected)
    if active is not None:  # a gate of -inf neither writes nor decays
        b, a = (torch.where(active[:, None], x, -torch.inf) for x in (b, a))
    y, _ = ops.delta_rule_step_(
        *_heads(c, qkv), state, g=a, beta=b, A_log=weights["A_log"], dt_bias=weights["dt_bias"], normalize=True,
        beta_limit=1.0,
    )  # fmt: skip
    steps.add_projected_(hidden, _gated(c, weights, y, z), weights["out_proj"], scale=scale, heads=c.heads)


def _parts(c: DeltaConfig, projected: Tensor) -> tuple[Tensor, ...]:
    """Split the projection: the gate of the answers, what is convolved, the gates of writes, and of decays."""
    return projected.split([c.d_inner, c.conv_dim, c.nheads, c.nheads], -1)


def _heads(c: DeltaConfig, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.split([c.ngroups * c.dstate, c.ngroups * c.dstate, c.d_inner], -1)
    groups = (c.ngroups, c.dstate)
    return q.unflatten(-1, groups), k.unflatten(-1, groups), v.unflatten(-1, (c.nheads, c.headdim))


def _gated(c: DeltaConfig, weights: Tree, y: Tensor, z: Tensor) -> Tensor:
    """Normalise each head, and then gate it."""
    z = z.unflatten(-1, (c.nheads, c.headdim))
    return ops.gated_rmsnorm(y, z, weights["gated_norm"], eps=c.norm_eps, norm_before_gate=True).flatten(-2)
