"""Mamba-2: a stack of equal layers.

A layer is ``h + out_proj(norm(ssd(conv(in_proj(norm(h)))), gate))``. Weights and matrix products have the dtype of the
parameters; step sizes, decays, norms and the residual stream are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from refold import ops
from refold.models.configs import Mamba2Config, Mixer2Config
from refold.models.torch import steps
from refold.models.torch.heads import enter, leave
from refold.models.torch.layers import Rows, Tree, add_norm, embed, init_state, linear, output, wide


def forward(
    config: Mamba2Config, params: Tree, tokens: Tensor, state: Tree | None = None, *,
    lengths: Sequence[int] | None = None, kind: str = "last", chunk_size: int | None = None, group: Any = None,
) -> tuple[Tensor, Tree]:  # fmt: skip
    """Read ``tokens (b, t)`` on top of ``state``.

    Args:
        config: The model.
        params: Parameters with separate layers: see ``refold.models.torch``.
        tokens: Token ids; rows shorter than ``t`` are padded on the right with any id.
        state: State to go on from; None begins afresh.
        lengths: Tokens of each row that are no padding, on the host; None when all are. Padding costs nothing: rows of
            several lengths are read as one pack.
        kind: ``last``, ``all`` or ``hidden``: see ``layers.output``.
        chunk_size: Chunk of the scan; None picks the device's.
        group: What shares the tokens, as `refold.ops.ssd` takes it: each rank passes its own, without ``lengths``.

    Returns:
        Logits or hidden states, and the state after each row's last token. With a group, these are logits of the rank's
        tokens, and every rank has the state after the last token of all, without a gradient.

    Raises:
        ArgumentError: There are ``lengths`` and a group.
    """
    rows = Rows.of(tokens, lengths, group)
    if state is None:
        state = init_state(config, rows.batch, params["embedding"].dtype, device=tokens.device)
    hidden, mixed = embed(params, rows.tokens), None
    windows, states = [], []
    for weights, window, ssm in zip(params["layers"], state["conv"], state["ssm"], strict=True):
        hidden, normed = add_norm(hidden, mixed, weights["norm"], config.norm_eps)
        mixed, window, ssm = mixer(config.mixer, weights, normed, window, ssm, rows.offsets, chunk_size, group)
        windows.append(window)
        states.append(ssm)
    _, normed = add_norm(hidden, mixed, params["norm"], config.norm_eps)
    return output(params, normed, rows, kind), rows.after(state, conv=torch.stack(windows), ssm=torch.stack(states))


def step_(config: Mamba2Config, params: Tree, token: Tensor, state: Tree, *, active: Tensor | None = None) -> Tensor:
    """Read one token per row, ``(b,)``, and overwrite ``state``; rows that are not ``active`` keep theirs.

    Returns:
        Logits ``(b, vocab)``.
    """
    hidden = embed(params, token)
    for weights, window, ssm in zip(params["layers"], state["conv"], state["ssm"], strict=True):
        mixer_step_(config.mixer, weights, hidden, weights["norm"], config.norm_eps, window, ssm, active)
    state["length"] += 1 if active is None else active
    return steps.project(hidden, params.get("head", params["embedding"]), norm=params["norm"], eps=config.norm_eps)


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
