"""The scan of Mamba-1: every channel and state decays at its own rate, so it contains no matrix product."""

from __future__ import annotations

from typing import Any

from refold.ops.arrays import AnyArray, Array
from refold.ops.dispatch import call, call_in_place
from refold.ops.selective_scan.spec import SPEC, STEP

__all__ = ["selective_scan", "selective_scan_step", "selective_scan_step_"]


def selective_scan(
    x: Array, dt: Array, A: Array, B: Array, C: Array, *, D: Array | None = None, z: Array | None = None,
    dt_bias: Array | None = None, decay: Array | None = None, dt_softplus: bool = False,
    initial_state: Array | None = None, cu_seqlens: AnyArray | None = None, state_dtype: Any = None,
    group: object = None, backend: str | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Compute the selective scan of Mamba-1, with real A.

    Per batch row and channel, with state h of n numbers and h[-1] = initial_state::

        s[t] = softplus(dt[t] + dt_bias)                        (each part is optional)
        h[t] = decay[t] * exp(s[t] * A) * h[t-1] + s[t] * x[t] * B[t]
        y[t] = (h[t] · C[t] + D * x[t]) * silu(z[t])

    Args:
        x: Inputs, ``(b, t, d)``.
        dt: Step sizes, ``(b, t, d)``, before bias and softplus.
        A: Decay rates, ``(d, n)``.
        B: Input factors (keys), ``(b, t, n)``, or ``(b, t, g, n)``: channel ``i`` reads group ``i // (d / g)``.
        C: Readout factors (queries), ``(b, t, n)`` or ``(b, t, g, n)``.
        D: Skip connection, ``(d,)``.
        z: Gate, like ``x``.
        dt_bias: Added to ``dt``, ``(d,)``.
        decay: A second factor of the state, next to ``exp(s * A)``, ``(b, t, d)``; of any sign, zero, above one.
        dt_softplus: Pass ``dt`` through softplus (the identity above 20).
        initial_state: ``(b, d, n)``; zeros if None.
        cu_seqlens: Packs sequences along time: ``k + 1`` offsets from 0 to t, on the device of ``x``. The batch is
            then 1 and states are ``(k, d, n)``. A sequence may be empty.
        state_dtype: Dtype of the final state; None is float32 (float64 for float64 inputs).
        group: A process group, a 1-D device mesh or a `refold.parallel.Cut`: its ranks share the sequence, and
            each passes its own tokens. docs/scale.md says what is shared and how. PyTorch only.
        backend: None picks the first that can run. A named one runs, or raises with its reason.

    Returns:
        ``(y, state)``: ``y`` like ``x``; ``state`` ``(b, d, n)``.

    Raises:
        ShapeError: An axis disagrees; the message lists all sizes.
        DtypeError: A dtype is not among those supported, or frameworks are mixed.
        DeviceError: Arrays live on different devices.
        ArgumentError: ``cu_seqlens`` is inconsistent.
        BackendUnsupported: ``backend`` was named but cannot run; lists the reasons.

    Numerics:
        States and decays are float32 (float64 for float64 inputs). Gradients flow to every array but ``cu_seqlens``,
        and from both results. docs/numerics.md shows measured errors.

    References:
        Gu & Dao, "Mamba", 2023, arXiv:2312.00752.

    Example:
        >>> import numpy as np
        >>> from refold.ops import selective_scan
        >>> x, B = np.ones((2, 64, 12)), np.ones((2, 64, 4))
        >>> y, state = selective_scan(x, 0.1 * x, -np.ones((12, 4)), B, B)
        >>> y.shape, state.shape
        ((2, 64, 12), (2, 12, 4))
    """
    arrays = (x, dt, A, B, C, D, z, dt_bias, decay, initial_state, cu_seqlens)
    return call(SPEC, arrays, (dt_softplus, state_dtype), backend, group)


def selective_scan_step(
    x: Array, dt: Array, A: Array, B: Array, C: Array, state: Array, *, D: Array | None = None, z: Array | None = None,
    dt_bias: Array | None = None, decay: Array | None = None, dt_softplus: bool = False, backend: str | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """One token of `selective_scan`, or a few.

    Args:
        x: Inputs, ``(b, d)``, or ``(b, t, d)`` for a few tokens at once.
        dt: Step sizes, like ``x``.
        A: Decay rates, ``(d, n)``.
        B: Input factors (keys), ``(b, n)``, ``(b, g, n)``, or with a time axis after the batch.
        C: Readout factors (queries), as ``B``.
        state: ``(b, d, n)``, any float dtype; arithmetic is float32.
        D: Skip connection, ``(d,)``.
        z: Gate, like ``x``.
        dt_bias: Added to ``dt``, ``(d,)``.
        decay: A second factor of the state, next to ``exp(s * A)``, like ``x``.
        dt_softplus: Pass ``dt`` through softplus.
        backend: None picks the first that can run. A named one runs, or raises with its reason.

    Returns:
        ``(y, state)``: ``y`` like ``x``; a new state like ``state``.

    Raises:
        ArgumentError: As `selective_scan`.

    Example:
        >>> import numpy as np
        >>> from refold.ops import selective_scan_step
        >>> y, state = selective_scan_step(
        ...     np.ones((2, 12)), np.ones((2, 12)), -np.ones((12, 4)), np.ones((2, 4)), np.ones((2, 4)),
        ...     np.zeros((2, 12, 4)))
        >>> y.shape, float(y[0, 0])
        ((2, 12), 4.0)
    """
    return call(STEP, (x, dt, A, B, C, state, D, z, dt_bias, decay), (dt_softplus,), backend)


def selective_scan_step_(
    x: Array, dt: Array, A: Array, B: Array, C: Array, state: Array, *, D: Array | None = None, z: Array | None = None,
    dt_bias: Array | None = None, decay: Array | None = None, dt_softplus: bool = False, backend: str | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Compute `selective_scan_step`, overwrite ``state`` with the new state, and return it. There is no gradient."""
    return call_in_place(STEP, (x, dt, A, B, C, state, D, z, dt_bias, decay), (dt_softplus,), backend), state
