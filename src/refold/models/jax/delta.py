"""The gated delta rule of Qwen3.5 as the mixer of a hybrid model."""

import jax.numpy as jnp

from refold import ops
from refold.models.configs import DeltaConfig
from refold.models.jax import inputs
from refold.models.jax.layers import Array, Tree, linear
from refold.models.jax.sharding import time as time_shards


def mixer(
    c: DeltaConfig, weights: Tree, u: Array, conv: Array, state: Array, lengths: Array | None, valid: Array | None,
    chunk_size: int | None = None, time_axis: str | None = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Mix ``u (b, t, d)`` over time from the states ``conv`` and ``state``; padding leaves both as they are."""
    parts, window = inputs.project(c, weights, u, conv, inputs.of_tokens(lengths, time_axis))
    options = {**_gates(weights, parts, valid), "initial_state": state, "chunk_size": chunk_size}
    if time_axis is None:
        y, after = ops.delta_rule(*_heads(c, parts), **options)
    else:
        y, after = time_shards.delta_rule(*_heads(c, parts), axis=time_axis, **options)
    return _close(c, weights, y, parts["z"]), window, after.astype(state.dtype)


def mixer_step(
    c: DeltaConfig, weights: Tree, u: Array, conv: Array, state: Array, active: Array | None
) -> tuple[Array, Array, Array]:
    """Mix one token ``u (b, d)``."""
    parts, window = inputs.project(c, weights, u, conv, inputs.of_a_token(active))
    q, k, v = _heads(c, parts)
    y, state = ops.delta_rule_step(q, k, v, state, **_gates(weights, parts, active))
    return _close(c, weights, y, parts["z"]), window, state


def _gates(weights: Tree, parts: Tree, valid: Array | None) -> Tree:
    """Make the options of the delta rule; where nothing is read, a gate of -inf neither writes nor decays."""
    b, a = parts["b"], parts["a"]
    if valid is not None:
        b, a = (jnp.where(valid[..., None], x, -jnp.inf) for x in (b, a))
    gates = {"g": a, "beta": b, "A_log": weights["A_log"], "dt_bias": weights["dt_bias"]}
    return {**gates, "normalize": True, "beta_limit": 1.0}


def _heads(c: DeltaConfig, parts: Tree) -> list[Array]:
    sizes = {"q": (c.ngroups, c.dstate), "k": (c.ngroups, c.dstate), "v": (c.nheads, c.headdim)}
    return [parts[name].reshape(*parts[name].shape[:-1], *size) for name, size in sizes.items()]


def _close(c: DeltaConfig, weights: Tree, y: Array, z: Array) -> Array:
    """Normalise each head, gate it, and project back to the residual stream."""
    y = ops.gated_rmsnorm(y, z.reshape(y.shape), weights["gated_norm"], eps=c.norm_eps, norm_before_gate=True)
    return linear(y.reshape(z.shape), weights["out_proj"])
