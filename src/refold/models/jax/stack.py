"""Mamba-1 and Mamba-2: a stack of equal layers, scanned over, so that compile time does not grow with depth.

A layer is ``h + mixer(norm(h))``. Weights and matrix products have the dtype of the parameters; step sizes, decays,
norms and the residual stream are float32.
"""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import jax.numpy as jnp

from refold.models.configs import Mamba2Config, MambaConfig
from refold.models.counts import check_state
from refold.models.jax import mamba, mamba2
from refold.models.jax.layers import Array, Tree, embed, init_state, output, over_layers, rms_norm, valid_tokens
from refold.models.jax.sharding import time as time_shards


def _mixer(config: MambaConfig | Mamba2Config) -> ModuleType:
    """Choose the module that computes a layer."""
    return mamba if isinstance(config, MambaConfig) else mamba2


def forward(
    config: MambaConfig | Mamba2Config, params: Tree, tokens: Array, state: Tree | None = None, *,
    lengths: Array | None = None, kind: str = "last", chunk_size: int | None = None, time_axis: str | None = None,
) -> tuple[Array, Tree]:  # fmt: skip
    """Read ``tokens (b, t)`` on top of ``state``.

    Args:
        config: The model.
        params: Parameters as ``refold.models.checkpoint`` lays them out.
        tokens: Token ids; rows shorter than ``t`` are padded on the right with any id.
        state: State to go on from; None begins afresh.
        lengths: Valid tokens of each row, ``(b,)``; None when all are.
        kind: ``last``, ``all`` or ``hidden``: see ``layers.output``.
        chunk_size: Chunk of the scan of Mamba-2; None picks the device's.
        time_axis: Mesh axis over which time is cut, inside ``shard_map``; see `refold.models.jax.sharding`.

    Returns:
        Logits or hidden states, and the state after each row's last valid token.
    """
    batch, seqlen = tokens.shape
    if state is None:
        state = init_state(config, batch, params["embedding"].dtype)
    check_state(config, batch, state)
    options: Tree = {} if chunk_size is None else {"chunk_size": chunk_size}
    valid = valid_tokens(seqlen, lengths)
    mix = partial(_mixer(config).mixer, config.mixer, lengths=lengths, valid=valid, time_axis=time_axis, **options)
    hidden, states = _layers(mix, params, tokens, state, config.norm_eps)
    length = state["length"] + (time_shards.whole(seqlen, time_axis) if lengths is None else lengths)
    if time_axis is not None and kind == "last":
        hidden = time_shards.from_last(hidden[:, -1:], time_axis)
    return output(params, hidden, config.norm_eps, lengths, kind), {"length": length, **states}


def step(
    config: MambaConfig | Mamba2Config, params: Tree, token: Array, state: Tree, *, active: Array | None = None
) -> tuple[Array, Tree]:
    """Read one token per row, ``(b,)``; rows that are not ``active`` keep their state. Returns logits ``(b, vocab)``.

    The layers of ``params`` and ``state`` are both stacked or both separate.
    """
    check_state(config, token.shape[0], state)
    mix = partial(_mixer(config).mixer_step, config.mixer, active=active)
    hidden, states = _layers(mix, params, token, state, config.norm_eps)
    length = state["length"] + (1 if active is None else active.astype(jnp.int32))
    return output(params, hidden[:, None], config.norm_eps, None, "last"), {"length": length, **states}


def _layers(
    mix: Callable[..., tuple[Array, Array, Array]], params: Tree, tokens: Array, state: Tree, eps: float
) -> tuple[Array, Tree]:
    """Run all layers, of which ``mix(weights, u, conv, ssm)`` computes one: the residual stream and new states."""

    def layer(hidden: Array, held: Any) -> tuple[Array, Any]:
        weights, conv, ssm = held
        mixed, conv, ssm = mix(weights, rms_norm(hidden, weights["norm"], eps), conv, ssm)
        return hidden + mixed, (conv, ssm)

    held = state["conv"], state["ssm"]
    hidden, (conv, ssm) = over_layers(layer, embed(params, tokens), params["layers"], held)
    return hidden, {"conv": conv, "ssm": ssm}
