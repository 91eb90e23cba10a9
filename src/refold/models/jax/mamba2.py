"""The mixer of Mamba-2: ``out_proj(norm(ssd(conv(in_proj(u))), gate))``."""

import jax.numpy as jnp

from refold import ops
from refold.models.configs import Mixer2Config
from refold.models.jax import inputs
from refold.models.jax.layers import Array, Tree, linear
from refold.models.jax.sharding import time as time_shards
from refold.ops.jax.layout import step_sizes


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
