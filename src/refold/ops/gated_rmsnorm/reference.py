"""The definition of the gated RMS norm: NumPy, float64."""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from refold.ops.ssd.reference import silu


def gated_rmsnorm(
    x: ndarray, z: ndarray | None, weight: ndarray, eps: float, group_size: int | None = None,
    norm_before_gate: bool = False,
) -> ndarray:  # fmt: skip
    """Return ``x`` normalised a group of channels at a time, scaled, and gated before or after that."""
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    gate = np.ones_like(x) if z is None else silu(z.astype(np.float64))
    v = x if norm_before_gate else x * gate
    groups = v.reshape(*v.shape[:-1], -1, group_size or v.shape[-1])
    normed = (groups / np.sqrt(np.mean(groups**2, axis=-1, keepdims=True) + eps)).reshape(v.shape)
    return normed * weight * gate if norm_before_gate else normed * weight
