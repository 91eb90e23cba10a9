"""Gated RMS normalisation; XLA fuses all of it into one reduction and one elementwise pass."""

import jax
import jax.numpy as jnp

from refold.ops._jax_layout import Array, accumulator


def gated_rmsnorm(
    x: Array,
    weight: Array,
    z: Array | None = None,
    *,
    eps: float = 1e-5,
    group_size: int | None = None,
    norm_before_gate: bool = False,
) -> Array:
    """Compute :func:`refold.ops.gated_rmsnorm` on JAX arrays; see there for the equations and the arguments."""
    acc = accumulator(x.dtype)
    y = x.astype(acc)
    gate = None if z is None else jax.nn.silu(z.astype(acc))
    if gate is not None and not norm_before_gate:
        y = y * gate
    groups = y.reshape(*y.shape[:-1], -1, group_size or y.shape[-1])
    scale = jax.lax.rsqrt(jnp.mean(groups * groups, axis=-1, keepdims=True) + eps)
    y = (groups * scale).reshape(y.shape) * weight.astype(acc)
    if gate is not None and norm_before_gate:
        y = y * gate
    return y.astype(x.dtype)
