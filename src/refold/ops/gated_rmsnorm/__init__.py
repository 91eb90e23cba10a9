"""The norm after the scan of Mamba-2: RMS over groups of channels, with a gate before or after the norm."""

from __future__ import annotations

from refold.ops.arrays import Array
from refold.ops.dispatch import call
from refold.ops.gated_rmsnorm.spec import SPEC

__all__ = ["gated_rmsnorm"]


def gated_rmsnorm(
    x: Array, z: Array | None, weight: Array, *, eps: float, group_size: int | None = None,
    norm_before_gate: bool = False, backend: str | None = None,
) -> Array:  # fmt: skip
    """Compute an RMS norm with a gate.

    Over each group of ``group_size`` channels::

        norm(v) = v / sqrt(mean(v²) + eps) * weight
        y = norm(x * silu(z))                                   norm(x) * silu(z) if norm_before_gate

    Args:
        x: Inputs, ``(..., d)``.
        z: Gate, like ``x``, or None for a plain RMS norm.
        weight: ``(d,)``.
        eps: Added to the mean square; finite, 0 or more.
        group_size: Channels that are normalised together, a divisor of d; None for all.
        norm_before_gate: Apply the gate after the norm, not before it.
        backend: None picks the first that can run. A named one runs, or raises with its reason.

    Returns:
        ``y``, like ``x``.

    Raises:
        ShapeError: An axis disagrees, or group_size does not divide d.
        ArgumentError: ``eps`` or ``group_size`` has a value that it cannot have.
        DtypeError: A dtype is not among those supported, or frameworks are mixed.
        DeviceError: Arrays live on different devices.
        BackendUnsupported: ``backend`` was named but cannot run; lists the reasons.

    Numerics:
        Arithmetic is float32 (float64 for float64 inputs). Gradients flow to every array. docs/numerics.md shows
        measured errors.

    References:
        Zhang & Sennrich, "Root Mean Square Layer Normalization", 2019, arXiv:1910.07467.

    Example:
        >>> import numpy as np
        >>> from refold.ops import gated_rmsnorm
        >>> gated_rmsnorm(np.array([3.0, 4.0]), None, np.ones(2), eps=0.0).round(3).tolist()
        [0.849, 1.131]
    """
    return call(SPEC, (x, z, weight), (eps, group_size, norm_before_gate), backend)
