"""The mixer of Mamba-1: ``out_proj(selective_scan(conv(x)) * silu(z))`` with ``x, z = in_proj(u)``."""

import jax.numpy as jnp

from refold import ops
from refold.models.configs import MambaConfig
from refold.models.jax import inputs
from refold.models.jax.layers import Array, Tree, linear, rms_norm
from refold.models.jax.sharding import time as time_shards
from refold.ops.jax.layout import product, step_sizes


def mixer(
    c: MambaConfig, weights: Tree, u: Array, conv: Array, ssm: Array, lengths: Array | None, valid: Array | None,
    time_axis: str | None = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Mix ``u (b, t, d)`` over time from the states ``conv`` and ``ssm``; padding leaves both as they are."""
    z, x, dt, B, C, conv = _inputs(c, weights, u, conv, inputs.of_tokens(lengths, time_axis))
    if valid is not None:
        dt = jnp.where(valid[..., None], dt, 0)
    options = {"D": weights["D"], "z": z, "initial_state": ssm, "state_dtype": ssm.dtype}
    A = -jnp.exp(weights["A_log"])
    if time_axis is None:
        y, ssm = ops.selective_scan(x, dt, A, B, C, **options)
    else:
        y, ssm = time_shards.selective_scan(x, dt, A, B, C, axis=time_axis, **options)
    return linear(y, weights["out_proj"], weights.get("out_bias")), conv, ssm


def mixer_step(
    c: MambaConfig, weights: Tree, u: Array, conv: Array, ssm: Array, active: Array | None
) -> tuple[Array, Array, Array]:
    """Mix one token ``u (b, d)``."""
    z, x, dt, B, C, conv = _inputs(c, weights, u, conv, inputs.of_a_token(active))
    if active is not None:
        dt = jnp.where(active[:, None], dt, 0)
    y, ssm = ops.selective_scan_step(x, dt, -jnp.exp(weights["A_log"]), B, C, ssm, D=weights["D"], z=z)
    return linear(y, weights["out_proj"], weights.get("out_bias")), conv, ssm


def _inputs(c: MambaConfig, weights: Tree, u: Array, conv: Array, convolve: inputs.Convolve) -> tuple[Array, ...]:
    """Project ``u`` and convolve: z, x, the step sizes dt (float32), B, C, and the convolution's new window."""
    x, z = _project(weights, u)
    x, conv = convolve(x, conv, weights["conv_weight"], weights.get("conv_bias"))
    return z, x, *_selection(c, weights, x), conv


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
