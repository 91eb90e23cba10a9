"""The elementwise linear recurrence: the core of gated recurrent layers that apply no matrix to their state."""

from __future__ import annotations

from refold.ops.arrays import AnyArray, Array
from refold.ops.dispatch import call
from refold.ops.linear_scan.spec import SPEC

__all__ = ["linear_scan"]


def linear_scan(
    a: Array, x: Array, *, initial_state: Array | None = None, reverse: bool = False,
    cu_seqlens: AnyArray | None = None, reset: AnyArray | None = None, group: object = None, backend: str | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Compute an elementwise linear recurrence along axis 1.

    With h[-1] = initial_state::

        h[t] = (0 if reset[t] else a[t] * h[t-1]) + x[t]         (t+1 for t-1 if reverse)

    Args:
        a: Factors, ``(b, t, ...)``, of any sign. They are multiplied, never divided.
        x: Inputs, the same shape.
        initial_state: ``(b, ...)``; zeros if None.
        reverse: Run from the last token to the first.
        cu_seqlens: Packs sequences along time: ``k + 1`` offsets from 0 to t, on the device of ``x``. The batch is
            then 1 and states are ``(k, ...)``. A sequence may be empty.
        reset: Where the state is forgotten, bool, the shape of ``x``. A factor of zero forgets a finite state. A reset
            also forgets a NaN or an infinity, and has no gradient.
        group: A process group, a 1-D device mesh or a `refold.parallel.Cut`: its ranks share the sequence, and
            each passes its own tokens. docs/scale.md says what is shared and how. PyTorch only.
        backend: None picks the first that can run. A named one runs, or raises with its reason.

    Returns:
        ``(h, state)``: ``h`` like ``x``; ``state`` ``(b, ...)``, float32 (float64 for float64 inputs): the last h
        that is computed. With ``reverse``, that is the h of the first token.

    Raises:
        ShapeError: An axis disagrees; the message lists all sizes.
        DtypeError: A dtype is not among those supported, or frameworks are mixed.
        DeviceError: Arrays live on different devices.
        ArgumentError: ``cu_seqlens`` is inconsistent.
        BackendUnsupported: ``backend`` was named but cannot run; lists the reasons.

    Numerics:
        Arithmetic is float32 (float64 for float64 inputs). Gradients flow to every floating-point array, and
        from both results. docs/numerics.md shows measured errors.

    References:
        Blelloch, "Prefix Sums and Their Applications", 1990, CMU-CS-90-190. With resets: Lu et al., "Structured State
        Space Models for In-Context Reinforcement Learning", 2023, arXiv:2303.03982.

    Example:
        >>> import numpy as np
        >>> from refold.ops import linear_scan
        >>> h, state = linear_scan(np.full((1, 4, 1), 0.5), np.ones((1, 4, 1)))
        >>> h.ravel().tolist(), state.tolist()
        ([1.0, 1.5, 1.75, 1.875], [[1.875]])
    """
    return call(SPEC, (a, x, initial_state, cu_seqlens, reset), (reverse,), backend, group)
