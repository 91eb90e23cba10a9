"""The gated delta rule of Qwen3.5 as the mixer of a hybrid model."""

import jax.numpy as jnp

from refold import ops
from refold.errors import ArgumentError
from refold.models.configs import DeltaConfig
from refold.models.jax.layers import Array, Tree, last_window, linear, select


def mixer(
    c: DeltaConfig, weights: Tree, u: Array, conv: Array, state: Array, lengths: Array | None, valid: Array | None,
    chunk_size: int | None = None, time_axis: str | None = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Mix ``u (b, t, d)`` over time from the states ``conv`` and ``state``; padding leaves both as they are."""
    if time_axis is not None:
        raise ArgumentError("layers with the delta rule are not cut over time; leave time_axis out.")
    z, qkv, b, a = _parts(c, linear(u, weights["in_proj"]))
    window = last_window(conv, qkv, lengths)
    qkv, _ = ops.causal_conv1d(qkv, weights["conv_weight"], activation="silu", initial_state=conv)
    y, after = ops.delta_rule(
        *_heads(c, qkv), **_gates(weights, b, a, valid), initial_state=state, chunk_size=chunk_size
    )
    return _close(c, weights, y, z), window, after.astype(state.dtype)


def mixer_step(
    c: DeltaConfig, weights: Tree, u: Array, conv: Array, state: Array, active: Array | None
) -> tuple[Array, Array, Array]:
    """Mix one token ``u (b, d)``."""
    z, qkv, b, a = _parts(c, linear(u, weights["in_proj"]))
    qkv, window = ops.causal_conv1d_step(qkv, weights["conv_weight"], conv, activation="silu")
    q, k, v = _heads(c, qkv)
    y, state = ops.delta_rule_step(q, k, v, state, **_gates(weights, b, a, active))
    return _close(c, weights, y, z), select(active, window, conv), state


def _parts(c: DeltaConfig, projected: Array) -> list[Array]:
    """Split the projection: the gate of the answers, what is convolved, the gates of writes, and of decays."""
    ends = [c.d_inner, c.d_inner + c.conv_dim, c.d_inner + c.conv_dim + c.nheads]
    return jnp.split(projected, ends, axis=-1)


def _gates(weights: Tree, b: Array, a: Array, valid: Array | None) -> Tree:
    """Return the options of the delta rule; where nothing is read, a gate of -inf neither writes nor decays."""
    if valid is not None:
        b, a = (jnp.where(valid[..., None], x, -jnp.inf) for x in (b, a))
    gates = {"g": a, "beta": b, "A_log": weights["A_log"], "dt_bias": weights["dt_bias"]}
    return {**gates, "normalize": True, "beta_limit": 1.0}


def _heads(c: DeltaConfig, qkv: Array) -> list[Array]:
    keys = c.ngroups * c.dstate
    groups = [(c.ngroups, c.dstate), (c.ngroups, c.dstate), (c.nheads, c.headdim)]
    parts = jnp.split(qkv, [keys, 2 * keys], axis=-1)
    return [part.reshape(*part.shape[:-1], *shape) for part, shape in zip(parts, groups, strict=True)]


def _close(c: DeltaConfig, weights: Tree, y: Array, z: Array) -> Array:
    """Normalise each head, gate it, and project back to the residual stream."""
    y = ops.gated_rmsnorm(y, z.reshape(y.shape), weights["gated_norm"], eps=c.norm_eps, norm_before_gate=True)
    return linear(y.reshape(z.shape), weights["out_proj"])
