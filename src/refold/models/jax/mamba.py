"""Mamba-1: a stack of equal layers, scanned over.

A layer is ``h + out_proj(selective_scan(conv(x)) * silu(z))`` with ``x, z = in_proj(norm(h))``. Weights and matrix
products have the dtype of the parameters; step sizes, decays, norms and the residual stream are float32.
"""

from typing import Any

import jax.numpy as jnp

from refold import ops
from refold.models.configs import MambaConfig
from refold.models.jax.layers import Array, Tree, init_state, last_window, linear, rms_norm, select, valid_tokens
from refold.models.jax.sharding import time as time_shards
from refold.models.jax.stack import read, read_one
from refold.ops.jax.layout import product, step_sizes


def forward(
    config: MambaConfig, params: Tree, tokens: Array, state: Tree | None = None, *, lengths: Array | None = None,
    kind: str = "last", time_axis: str | None = None,
) -> tuple[Array, Tree]:  # fmt: skip
    """Read ``tokens (b, t)`` on top of ``state``; arguments and results as in ``mamba2.forward``."""
    batch, seqlen = tokens.shape
    if state is None:
        state = init_state(config, batch, params["embedding"].dtype)
    valid = valid_tokens(seqlen, lengths)

    def layer(hidden: Array, inputs: Any) -> tuple[Array, Any]:
        weights, conv, ssm = inputs
        x, z = _project(weights, rms_norm(hidden, weights["norm"], config.norm_eps))
        window, conv = conv, last_window(conv, x, lengths)
        if time_axis is not None:
            window, conv = time_shards.window_before(x, window, time_axis), time_shards.from_last(conv, time_axis)
        x, _ = ops.causal_conv1d(
            x, weights["conv_weight"], weights.get("conv_bias"), activation="silu", initial_state=window
        )
        dt, B, C = _selection(config, weights, x)
        if valid is not None:
            dt = jnp.where(valid[..., None], dt, 0)
        options = {"D": weights["D"], "z": z, "initial_state": ssm, "state_dtype": ssm.dtype}
        A = -jnp.exp(weights["A_log"])
        if time_axis is None:
            y, ssm = ops.selective_scan(x, dt, A, B, C, **options)
        else:
            y, ssm = time_shards.selective_scan(x, dt, A, B, C, axis=time_axis, **options)
        return hidden + linear(y, weights["out_proj"], weights.get("out_bias")), (conv, ssm)

    return read(layer, params, tokens, state, config.norm_eps, lengths, kind, time_axis)


def step(
    config: MambaConfig, params: Tree, token: Array, state: Tree, *, active: Array | None = None
) -> tuple[Array, Tree]:
    """Read one token per row, ``(b,)``; rows that are not ``active`` keep their state. Returns logits ``(b, vocab)``.

    The layers of ``params`` and ``state`` are both stacked or both separate.
    """

    def layer(hidden: Array, inputs: Any) -> tuple[Array, Any]:
        weights, conv, ssm = inputs
        x, z = _project(weights, rms_norm(hidden, weights["norm"], config.norm_eps))
        x, window = ops.causal_conv1d_step(x, weights["conv_weight"], conv, weights.get("conv_bias"), activation="silu")
        dt, B, C = _selection(config, weights, x)
        if active is not None:
            dt = jnp.where(active[:, None], dt, 0)
        y, ssm = ops.selective_scan_step(x, dt, -jnp.exp(weights["A_log"]), B, C, ssm, D=weights["D"], z=z)
        mixed = linear(y, weights["out_proj"], weights.get("out_bias"))
        return hidden + mixed, (select(active, window, conv), ssm)

    return read_one(layer, params, token, state, config.norm_eps, active)


def _project(weights: Tree, u: Array) -> tuple[Array, Array]:
    """Return the convolution's input x and the gate z; parameters spread over devices hold the projection in parts."""
    if "in_proj" in weights:
        x, z = jnp.split(linear(u, weights["in_proj"], weights.get("in_bias")), 2, axis=-1)
        return x, z
    parts, biases = weights["in_parts"], weights.get("in_bias_parts", {})
    return linear(u, parts["x"], biases.get("x")), linear(u, parts["z"], biases.get("z"))


def _selection(config: MambaConfig, weights: Tree, x: Array) -> tuple[Array, Array, Array]:
    """Compute step sizes (float32), B and C from the input."""
    selected = linear(x, weights["x_proj"])
    dt, B, C = jnp.split(selected, [config.dt_rank, config.dt_rank + config.dstate], axis=-1)
    if config.selection_eps is not None:
        dt, B, C = (rms_norm(a, jnp.ones((), a.dtype), config.selection_eps) for a in (dt, B, C))
    raw = product("...r,dr->...d", dt, weights["dt_proj"])
    return step_sizes(raw, weights["dt_bias"], True, (0.0, float("inf")), jnp.float32), B, C
