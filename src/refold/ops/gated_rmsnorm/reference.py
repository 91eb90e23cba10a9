"""The definition of the gated RMS norm."""

from __future__ import annotations

from refold.ops.definition import Array, silu, wide


def gated_rmsnorm(
    x: Array, z: Array | None, weight: Array, eps: float, group_size: int | None = None,
    norm_before_gate: bool = False,
) -> Array:  # fmt: skip
    """Return ``x`` normalised a group of channels at a time, scaled, and gated before or after that."""
    x, z, weight = wide(x, z, weight)
    gate = 1.0 if z is None else silu(z)
    v = x if norm_before_gate else x * gate
    groups = v.reshape(*v.shape[:-1], -1, group_size or v.shape[-1])
    normed = (groups / ((groups**2).mean(-1)[..., None] + eps) ** 0.5).reshape(v.shape) * weight
    return normed * gate if norm_before_gate else normed
