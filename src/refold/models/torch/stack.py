"""Mamba-1, Falcon Mamba and Mamba-2: a stack of equal layers.

A layer is ``h + mixer(norm(h))``. Weights and matrix products have the dtype of the parameters; step sizes, decays,
norms and the residual stream are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from refold.models.configs import Mamba2Config, MambaConfig
from refold.models.counts import check_state
from refold.models.torch import mamba, mamba2, steps
from refold.models.torch.layers import Rows, Tree, add_norm, embed, init_state, output


def _mixer(config: MambaConfig | Mamba2Config) -> ModuleType:
    """Choose the module that computes a layer."""
    return mamba if isinstance(config, MambaConfig) else mamba2


def forward(
    config: MambaConfig | Mamba2Config, params: Tree, tokens: Tensor, state: Tree | None = None, *,
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
        chunk_size: Chunk of the scan of Mamba-2; None picks the device's.
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
    check_state(config, rows.batch, state)
    mix, c = _mixer(config).mixer, config.mixer
    options: Tree = {} if chunk_size is None else {"chunk_size": chunk_size}
    hidden, mixed = embed(params, rows.tokens), None
    windows, states = [], []
    for weights, window, ssm in zip(params["layers"], state["conv"], state["ssm"], strict=True):
        hidden, normed = add_norm(hidden, mixed, weights["norm"], config.norm_eps)
        mixed, window, ssm = mix(c, weights, normed, window, ssm, rows.offsets, group=group, **options)
        windows.append(window)
        states.append(ssm)
    _, normed = add_norm(hidden, mixed, params["norm"], config.norm_eps)
    return output(params, normed, rows, kind), rows.after(state, conv=torch.stack(windows), ssm=torch.stack(states))


def step_(
    config: MambaConfig | Mamba2Config, params: Tree, token: Tensor, state: Tree, *, active: Tensor | None = None
) -> Tensor:
    """Read one token per row, ``(b,)``, and overwrite ``state``; rows that are not ``active`` keep theirs.

    Returns:
        Logits ``(b, vocab)``.
    """
    check_state(config, len(token), state)
    step, c = _mixer(config).mixer_step_, config.mixer
    hidden = embed(params, token)
    for weights, window, ssm in zip(params["layers"], state["conv"], state["ssm"], strict=True):
        step(c, weights, hidden, weights["norm"], config.norm_eps, window, ssm, active)
    state["length"] += 1 if active is None else active
    return steps.project(hidden, params.get("head", params["embedding"]), norm=params["norm"], eps=config.norm_eps)
