"""Mamba-1 and Falcon Mamba: a stack of equal layers.

A layer is ``h + out_proj(selective_scan(conv(x)) * silu(z))`` with ``x, z = in_proj(norm(h))``. Weights and matrix
products have the dtype of the parameters; step sizes, decays, norms and the residual stream are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from refold import ops
from refold.models.configs import MambaConfig
from refold.models.torch import steps
from refold.models.torch.heads import enter, leave, sum_over
from refold.models.torch.layers import Rows, Tree, add_norm, embed, init_state, linear, output, rms_norm


def forward(
    config: MambaConfig, params: Tree, tokens: Tensor, state: Tree | None = None, *,
    lengths: Sequence[int] | None = None, kind: str = "last", group: Any = None,
) -> tuple[Tensor, Tree]:  # fmt: skip
    """Read ``tokens (b, t)`` on top of ``state``; arguments and results as in ``mamba2.forward``."""
    rows = Rows.of(tokens, lengths, group)
    if state is None:
        state = init_state(config, rows.batch, params["embedding"].dtype, device=tokens.device)
    hidden, mixed = embed(params, rows.tokens), None
    windows, states = [], []
    for weights, window, ssm in zip(params["layers"], state["conv"], state["ssm"], strict=True):
        hidden, normed = add_norm(hidden, mixed, weights["norm"], config.norm_eps)
        normed, weights = enter(config.heads, normed, weights)
        x, z = linear(normed, weights["in_proj"], weights.get("in_bias")).chunk(2, -1)
        x, window = ops.causal_conv1d(
            x, weights["conv_weight"], weights.get("conv_bias"), activation="silu", initial_state=window,
            cu_seqlens=rows.offsets, group=group,
        )  # fmt: skip
        dt, B, C = _selection(config, weights, x)
        y, ssm = ops.selective_scan(
            x, dt, -weights["A_log"].exp(), B, C, D=weights["D"], z=z, dt_bias=weights["dt_bias"], dt_softplus=True,
            initial_state=ssm, cu_seqlens=rows.offsets, state_dtype=ssm.dtype, group=group,
        )  # fmt: skip
        mixed = leave(config.heads, y, weights["out_proj"], weights.get("out_bias"))
        windows.append(window)
        states.append(ssm)
    _, normed = add_norm(hidden, mixed, params["norm"], config.norm_eps)
    return output(params, normed, rows, kind), rows.after(state, conv=torch.stack(windows), ssm=torch.stack(states))


def step_(config: MambaConfig, params: Tree, token: Tensor, state: Tree, *, active: Tensor | None = None) -> Tensor:
    """Read one token per row; arguments and results as in ``mamba2.step_``."""
    c = config
    hidden = embed(params, token)
    for weights, window, ssm in zip(params["layers"], state["conv"], state["ssm"], strict=True):
        projected = steps.project_and_convolve_(
            hidden, weights["in_proj"], weights.get("in_bias"), norm=weights["norm"], eps=c.norm_eps, window=window,
            taps=weights["conv_weight"], taps_bias=weights.get("conv_bias"), first=0, active=active,
        )  # fmt: skip
        x, z = projected.chunk(2, -1)
        dt, B, C = _everywhere(c, steps.project(x, weights["x_proj"])).split([c.dt_rank, c.dstate, c.dstate], -1)
        y = steps.selective_scan_(
            x, dt, B, C, z, weights["dt_proj"], weights["dt_bias"], weights["A_log"], weights["D"], ssm, active,
            eps=c.selection_eps,
        )  # fmt: skip
        steps.add_projected_(hidden, y, weights["out_proj"], weights.get("out_bias"), heads=c.heads)
    state["length"] += 1 if active is None else active
    return steps.project(hidden, params.get("head", params["embedding"]), norm=params["norm"], eps=c.norm_eps)


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
