"""State space duality: the scan of Mamba-2. Without decay, the same scan is causal linear attention."""

from __future__ import annotations

import math
from typing import Any

from refold.ops.arrays import AnyArray, Array
from refold.ops.dispatch import call, call_in_place
from refold.ops.ssd.spec import SPEC, STEP

__all__ = ["ssd", "ssd_step", "ssd_step_"]


def ssd(
    x: Array, dt: Array, A: Array, B: Array, C: Array, *, D: Array | None = None, z: Array | None = None,
    dt_bias: Array | None = None, dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, math.inf),
    initial_state: Array | None = None, cu_seqlens: AnyArray | None = None, chunk_size: int | None = None,
    state_dtype: Any = None, group: object = None, backend: str | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Compute the state space dual scan of Mamba-2.

    Per batch row and head, with state S of shape (p, n) and S[-1] = initial_state::

        d[t] = clip(softplus(dt[t] + dt_bias), dt_limit)        (each part is optional)
        S[t] = exp(d[t] * A) * S[t-1] + d[t] * x[t] ⊗ B[t]
        y[t] = (S[t] @ C[t] + D * x[t]) * silu(z[t])

    With ``A = 0`` and ``dt = 1``, nothing decays. Then this is causal linear attention with queries C, keys B and
    values x.

    Args:
        x: Inputs, ``(b, t, h, p)``.
        dt: Step sizes, ``(b, t, h)``, before bias, softplus and limits.
        A: Decay rates, ``(h,)``. Negative in trained models; any sign is allowed.
        B: Input factors (keys), ``(b, t, g, n)``; head ``i`` reads group ``i // (h / g)``.
        C: Readout factors (queries), ``(b, t, g, n)``.
        D: Skip connection, ``(h,)`` or ``(h, p)``.
        z: Gate, like ``x``.
        dt_bias: Added to ``dt``, ``(h,)``.
        dt_softplus: Pass ``dt`` through softplus (the identity above 20).
        dt_limit: Clip the step size to this range, after softplus. Clipped steps have no gradient.
        initial_state: ``(b, h, p, n)``; zeros if None.
        cu_seqlens: Packs sequences of different lengths along time: ``k + 1`` offsets, int32 or int64, from 0 to t,
            on the device of ``x``. The batch is then 1 and states are ``(k, h, p, n)``. A sequence may be empty.
        chunk_size: Tokens per chunk. It changes speed and rounding only. None lets the backend choose.
        state_dtype: Dtype of the final state; None is float32 (float64 for float64 inputs).
        group: A process group, a 1-D device mesh or a `refold.parallel.Cut`: its ranks share the sequence, and
            each passes its own tokens. docs/scale.md says what is shared and how. PyTorch only.
        backend: None picks the first that can run. A named one runs, or raises with its reason.

    Returns:
        ``(y, state)``: ``y`` like ``x``; ``state`` ``(b, h, p, n)``, the next call's initial_state.

    Raises:
        ShapeError: An axis disagrees; the message lists all sizes.
        DtypeError: A dtype is not among those supported, or frameworks are mixed.
        DeviceError: Arrays live on different devices.
        ArgumentError: ``cu_seqlens``, ``chunk_size`` or ``dt_limit`` is inconsistent.
        BackendUnsupported: ``backend`` was named but cannot run; lists the reasons.

    Numerics:
        Decays accumulate in log space. Gradients flow to every array but ``cu_seqlens``, and from both results.
        docs/numerics.md shows measured errors.

    References:
        Dao & Gu, "Transformers are SSMs", 2024, arXiv:2405.21060.

    Example:
        >>> import numpy as np
        >>> from refold.ops import ssd
        >>> x, dt = np.ones((2, 64, 4, 16)), np.full((2, 64, 4), 0.1)
        >>> B = C = np.ones((2, 64, 1, 8))
        >>> y, state = ssd(x, dt, -np.ones(4), B, C)
        >>> y.shape, state.shape
        ((2, 64, 4, 16), (2, 4, 16, 8))
    """
    arrays = (x, dt, A, B, C, D, z, dt_bias, initial_state, cu_seqlens)
    return call(SPEC, arrays, (dt_softplus, dt_limit, chunk_size, state_dtype), backend, group)


def ssd_step(
    x: Array, dt: Array, A: Array, B: Array, C: Array, state: Array, *, D: Array | None = None, z: Array | None = None,
    dt_bias: Array | None = None, dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, math.inf),
    backend: str | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """One token of `ssd`, or a few.

    Computes exactly what `ssd` computes with ``initial_state=state``, limits included, so that decoding agrees with
    prefill.

    Args:
        x: Inputs, ``(b, h, p)``, or ``(b, t, h, p)`` for a few tokens at once.
        dt: Step sizes, ``(b, h)`` or ``(b, t, h)``.
        A: Decay rates, ``(h,)``.
        B: Input factors (keys), ``(b, g, n)`` or ``(b, t, g, n)``.
        C: Readout factors (queries), like ``B``.
        state: ``(b, h, p, n)``, any float dtype; arithmetic is float32.
        D: Skip connection, ``(h,)`` or ``(h, p)``.
        z: Gate, like ``x``.
        dt_bias: Added to ``dt``, ``(h,)``.
        dt_softplus: Pass ``dt`` through softplus.
        dt_limit: Clip the step size to this range.
        backend: None picks the first that can run. A named one runs, or raises with its reason.

    Returns:
        ``(y, state)``: ``y`` like ``x``; a new state like ``state``.

    Raises:
        ArgumentError: As `ssd`.

    Example:
        >>> import numpy as np
        >>> from refold.ops import ssd_step
        >>> y, state = ssd_step(
        ...     np.ones((2, 4, 16)), np.ones((2, 4)), -np.ones(4), np.ones((2, 1, 8)), np.ones((2, 1, 8)),
        ...     np.zeros((2, 4, 16, 8)))
        >>> y.shape, float(y[0, 0, 0])
        ((2, 4, 16), 8.0)
    """
    return call(STEP, (x, dt, A, B, C, state, D, z, dt_bias), (dt_softplus, dt_limit), backend)


def ssd_step_(
    x: Array, dt: Array, A: Array, B: Array, C: Array, state: Array, *, D: Array | None = None, z: Array | None = None,
    dt_bias: Array | None = None, dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, math.inf),
    backend: str | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Compute `ssd_step`, overwrite ``state`` with the new state, and return it. There is no gradient."""
    return call_in_place(STEP, (x, dt, A, B, C, state, D, z, dt_bias), (dt_softplus, dt_limit), backend), state
