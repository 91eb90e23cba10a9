"""Gated RMS normalisation; XLA fuses all of it into one reduction and one elementwise pass."""

from functools import partial

import jax
import jax.numpy as jnp

from refold.ops.jax.layout import Array, accumulator


@partial(jax.jit, static_argnames=("eps", "group_size", "norm_before_gate"))
def gated_rmsnorm(
    x: Array, z: Array | None, weight: Array, *, eps: float, group_size: int | None = None,
    norm_before_gate: bool = False,
) -> Array:  # fmt: skip
    """Compute :func:`refold.ops.gated_rmsnorm` on JAX arrays; see there for the equations and the arguments."""
    acc = accumulator(x.dtype)
    gate = 1 if z is None else jax.nn.silu(z.astype(acc))
    y = x.astype(acc) if norm_before_gate else x.astype(acc) * gate
    groups = y.reshape(*y.shape[:-1], -1, group_size or y.shape[-1])
    scale = jax.lax.rsqrt(jnp.mean(groups * groups, axis=-1, keepdims=True) + eps)
    y = (groups * scale).reshape(y.shape) * weight.astype(acc)
    return (y * gate if norm_before_gate else y).astype(x.dtype)
