"""A stack of equal layers with a window and a state each: what Mamba-1 and Mamba-2 do around their layers."""

from typing import Any

import jax.numpy as jnp

from refold.models.jax.layers import Array, Tree, embed, output, over_layers
from refold.models.jax.sharding import time as time_shards


def read(
    layer: Any, params: Tree, tokens: Array, state: Tree, eps: float, lengths: Array | None, kind: str,
    time_axis: str | None,
) -> tuple[Array, Tree]:  # fmt: skip
    """Read ``tokens (b, t)`` by ``layer(hidden, (weights, conv, ssm))``; the rest as in ``mamba2.forward``."""
    states = state["conv"], state["ssm"]
    hidden, (conv, ssm) = over_layers(layer, embed(params, tokens), params["layers"], states)
    length = state["length"] + (time_shards.whole(tokens.shape[1], time_axis) if lengths is None else lengths)
    if time_axis is not None and kind == "last":
        hidden = time_shards.from_last(hidden[:, -1:], time_axis)
    return output(params, hidden, eps, lengths, kind), {"length": length, "conv": conv, "ssm": ssm}


def read_one(
    layer: Any, params: Tree, token: Array, state: Tree, eps: float, active: Array | None
) -> tuple[Array, Tree]:
    """Read one token per row, ``(b,)``, in the same way; the rest as in ``mamba2.step``."""
    states = state["conv"], state["ssm"]
    hidden, (conv, ssm) = over_layers(layer, embed(params, token), params["layers"], states)
    length = state["length"] + (1 if active is None else active.astype(jnp.int32))
    logits = output(params, hidden[:, None], eps, None, "last")
    return logits, {"length": length, "conv": conv, "ssm": ssm}
