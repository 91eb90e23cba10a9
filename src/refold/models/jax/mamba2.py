"""Mamba-2: a stack of equal layers, scanned over, so that compile time does not grow with depth.

A layer is ``h + out_proj(norm(ssd(conv(in_proj(norm(h)))), gate))``. Weights and matrix products have the dtype of the
parameters; step sizes, decays, norms and the residual stream are float32.
"""

from typing import Any

import jax.numpy as jnp

from refold import ops
from refold.models.configs import Mamba2Config, Mixer2Config
from refold.models.jax import inputs
from refold.models.jax.layers import Array, Tree, init_state, linear, rms_norm, valid_tokens
from refold.models.jax.sharding import time as time_shards
from refold.models.jax.stack import read, read_one
from refold.ops.jax.layout import step_sizes


def forward(
    config: Mamba2Config, params: Tree, tokens: Array, state: Tree | None = None, *, lengths: Array | None = None,
    kind: str = "last", chunk_size: int | None = None, time_axis: str | None = None,
) -> tuple[Array, Tree]:  # fmt: skip
    """Read ``tokens (b, t)`` on top of ``state``.

    Args:
        config: The model.
        params: Parameters as ``refold.models.checkpoint`` lays them out.
        tokens: Token ids; rows shorter than ``t`` are padded on the right with any id.
        state: State to go on from; None begins afresh.
        lengths: Valid tokens of each row, ``(b,)``; None when all are.
        kind: ``last``, ``all`` or ``hidden``: see ``layers.output``.
        chunk_size: Chunk of the scan; None picks the device's.
        time_axis: Mesh axis over which time is cut, inside ``shard_map``; see `refold.models.jax.sharding`.

    Returns:
        Logits or hidden states, and the state after each row's last valid token.
    """
    batch, seqlen = tokens.shape
    if state is None:
        state = init_state(config, batch, params["embedding"].dtype)
    valid = valid_tokens(seqlen, lengths)

    def layer(hidden: Array, held: Any) -> tuple[Array, Any]:
        weights, conv, ssm = held
        normed = rms_norm(hidden, weights["norm"], config.norm_eps)
        mixed, conv, ssm = mixer(config.mixer, weights, normed, conv, ssm, lengths, valid, chunk_size, time_axis)
        return hidden + mixed, (conv, ssm)

    return read(layer, params, tokens, state, config.norm_eps, lengths, kind, time_axis)


def step(
    config: Mamba2Config, params: Tree, token: Array, state: Tree, *, active: Array | None = None
) -> tuple[Array, Tree]:
    """Read one token per row, ``(b,)``; rows that are not ``active`` keep their state. Returns logits ``(b, vocab)``.

    The layers of ``params`` and ``state`` are both stacked or both separate.
    """

    def layer(hidden: Array, held: Any) -> tuple[Array, Any]:
        weights, conv, ssm = held
        normed = rms_norm(hidden, weights["norm"], config.norm_eps)
        mixed, conv, ssm = mixer_step(config.mixer, weights, normed, conv, ssm, active)
        return hidden + mixed, (conv, ssm)

    return read_one(layer, params, token, state, config.norm_eps, active)


def mixer(
    c: Mixer2Config, weights: Tree, u: Array, conv: Array, ssm: Array, lengths: Array | None, valid: Array | None,
    chunk_size: int | None = None, time_axis: str | None = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Mix ``u (b, t, d)`` over time from the states ``conv`` and ``ssm``; padding leaves both as they are."""
    z, x, B, C, dt, conv = _inputs(c, weights, u, conv, inputs.of_tokens(lengths, time_axis))
    if valid is not None:
        dt = jnp.where(valid[..., None], dt, 0)
    A, D = -jnp.exp(weights["A_log"]), weights["D"]
    options = {"D": D, "initial_state": ssm, "chunk_size": chunk_size, "state_dtype": ssm.dtype}
    if time_axis is None:
        y, ssm = ops.ssd(x, dt, A, B, C, **options)
    else:
        y, ssm = time_shards.ssd(x, dt, A, B, C, axis=time_axis, **options)
    return _close(c, weights, y, z), conv, ssm


def mixer_step(
    c: Mixer2Config, weights: Tree, u: Array, conv: Array, ssm: Array, active: Array | None
) -> tuple[Array, Array, Array]:
    """Mix one token ``u (b, d)``."""
    z, x, B, C, dt, conv = _inputs(c, weights, u, conv, inputs.of_a_token(active))
    if active is not None:
        dt = jnp.where(active[:, None], dt, 0)
    y, ssm = ops.ssd_step(x, dt, -jnp.exp(weights["A_log"]), B, C, ssm, D=weights["D"])
    return _close(c, weights, y, z), conv, ssm


def _inputs(c: Mixer2Config, weights: Tree, u: Array, conv: Array, convolve: inputs.Convolve) -> tuple[Array, ...]:
    """Project ``u`` and convolve: z, x, B, C, the step sizes dt (float32), and the convolution's new window."""
    parts, conv = inputs.project(c, weights, u, conv, convolve)
    groups = (*u.shape[:-1], c.ngroups, c.dstate)
    x, B, C = parts["x"].reshape(*u.shape[:-1], c.nheads, c.headdim), parts["B"], parts["C"]
    dt = step_sizes(parts["dt"], weights["dt_bias"], True, c.dt_limit, jnp.float32)
    return parts["z"], x, B.reshape(groups), C.reshape(groups), dt, conv


def _close(c: Mixer2Config, weights: Tree, y: Array, z: Array) -> Array:
    """Gate, normalise and project back to the residual stream."""
    y = ops.gated_rmsnorm(
        y.reshape(z.shape), z, weights["gated_norm"], eps=c.norm_eps, group_size=c.d_inner // c.norm_groups
    )
    return linear(y, weights["out_proj"], weights.get("out_bias"))
