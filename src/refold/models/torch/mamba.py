"""The mixer of Mamba-1 and Falcon Mamba: ``out_proj(selective_scan(conv(x)) * silu(z))`` with ``x, z = in_proj(u)``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from refold import ops
from refold.models.configs import MambaConfig
from refold.models.torch import steps
from refold.models.torch.heads import enter, leave, sum_over
from refold.models.torch.layers import Tree, linear, rms_norm


def mixer(
    c: MambaConfig, weights: Tree, u: Tensor, window: Tensor, ssm: Tensor, offsets: Tensor | None, group: Any = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Mix ``u (b, t, d)`` over time; return it with the last inputs of the convolution and the state."""
    u, weights = enter(c.heads, u, weights)
    x, z = linear(u, weights["in_proj"], weights.get("in_bias")).chunk(2, -1)
    x, window = ops.causal_conv1d(
        x, weights["conv_weight"], weights.get("conv_bias"), activation="silu", initial_state=window,
        cu_seqlens=offsets, group=group,
    )  # fmt: skip
    dt, B, C = _selection(c, weights, x)
    y, ssm = ops.selective_scan(
        x, dt, -weights["A_log"].exp(), B, C, D=weights["D"], z=z, dt_bias=weights["dt_bias"], dt_softplus=True,
        initial_state=ssm, cu_seqlens=offsets, state_dtype=ssm.dtype, group=group,
    )  # fmt: skip
    return leave(c.heads, y, weights["out_proj"], weights.get("out_bias")), window, ssm


def mixer_step_(
    c: MambaConfig, weights: Tree, hidden: Tensor, norm: Tensor, eps: float, window: Tensor, ssm: Tensor,
    active: Tensor | None,
) -> None:  # fmt: skip
    """Add the mixer of the normalised ``hidden (b, d)`` to ``hidden``, and move its states on."""
    projected = steps.project_and_convolve_(
        hidden, weights["in_proj"], weights.get("in_bias"), norm=norm, eps=eps, window=window,
        taps=weights["conv_weight"], taps_bias=weights.get("conv_bias"), first=0, active=active,
    )  # fmt: skip
    x, z = projected.chunk(2, -1)
    dt, B, C = _everywhere(c, steps.project(x, weights["x_proj"])).split([c.dt_rank, c.dstate, c.dstate], -1)
    y = steps.selective_scan_(
        x, dt, B, C, z, weights["dt_proj"], weights["dt_bias"], weights["A_log"], weights["D"], ssm, active,
        eps=c.selection_eps,
    )  # fmt: skip
    steps.add_projected_(hidden, y, weights["out_proj"], weights.get("out_bias"), heads=c.heads)


def _everywhere(config: MambaConfig, x: Tensor) -> Tensor:
    """Sum over ranks, of which each has some channels."""
    return x if config.heads is None else sum_over(config.heads.cut, x, now=True, back=True)


def _selection(config: MambaConfig, weights: Tree, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute step sizes before bias and softplus, B and C from the input."""
    c = config
    dt, B, C = _everywhere(c, linear(x, weights["x_proj"])).split([c.dt_rank, c.dstate, c.dstate], -1)
    if c.selection_eps is not None:
        dt, B, C = (rms_norm(a, a.new_ones(()), c.selection_eps) for a in (dt, B, C))
    return linear(dt, weights["dt_proj"]), B, C
