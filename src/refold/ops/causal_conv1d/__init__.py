"""The short depthwise convolution before the scans. Its state is the window of last inputs, for decoding."""

from __future__ import annotations

from refold.ops.arrays import AnyArray, Array
from refold.ops.causal_conv1d.spec import SPEC, STEP
from refold.ops.dispatch import call, call_in_place

__all__ = ["causal_conv1d", "causal_conv1d_step", "causal_conv1d_step_"]


def causal_conv1d(
    x: Array, weight: Array, bias: Array | None = None, *, activation: str | None = None,
    initial_state: Array | None = None, cu_seqlens: AnyArray | None = None, group: object = None,
    backend: str | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Compute a causal depthwise convolution along time.

    Per batch row and channel, with x[-1], x[-2], ... taken from initial_state::

        y[t] = activation(bias + Σ_j weight[j] * x[t - (w-1) + j])

    Args:
        x: Inputs, ``(b, t, d)``.
        weight: ``(d, w)``; the last tap multiplies the current token.
        bias: ``(d,)``.
        activation: None or ``"silu"``.
        initial_state: The last ``w - 1`` inputs before the first token, oldest first, ``(b, d, w-1)``; zeros if None.
        cu_seqlens: Packs sequences along time: ``k + 1`` offsets from 0 to t, on the device of ``x``. The batch is
            then 1 and states are ``(k, d, w-1)``. A sequence may be empty.
        group: A process group, a 1-D device mesh or a `refold.parallel.Cut`: its ranks share the sequence, and
            each passes its own tokens. docs/scale.md says what is shared and how. PyTorch only.
        backend: None picks the first that can run. A named one runs, or raises with its reason.

    Returns:
        ``(y, state)``: ``y`` like ``x``; ``state`` ``(b, d, w-1)``, the last inputs, in the dtype of ``x``.

    Raises:
        ShapeError: An axis disagrees; the message lists all sizes.
        DtypeError: A dtype is not among those supported, or frameworks are mixed.
        DeviceError: Arrays live on different devices.
        ArgumentError: ``cu_seqlens`` or ``activation`` is not valid.
        BackendUnsupported: ``backend`` was named but cannot run; lists the reasons.

    Numerics:
        Sums are float32 (float64 for float64 inputs); the state is a copy of inputs. Gradients flow to every array but
        ``cu_seqlens``, and from both results. docs/numerics.md shows measured errors.

    References:
        Gu & Dao, "Mamba", 2023, arXiv:2312.00752, where it comes before the scan.

    Example:
        >>> import numpy as np
        >>> from refold.ops import causal_conv1d
        >>> y, state = causal_conv1d(np.arange(4.0).reshape(1, 4, 1), np.ones((1, 2)))
        >>> y.ravel().tolist(), state.tolist()
        ([0.0, 1.0, 3.0, 5.0], [[[3.0]]])
    """
    return call(SPEC, (x, weight, bias, initial_state, cu_seqlens), (activation,), backend, group)


def causal_conv1d_step(
    x: Array, weight: Array, state: Array, bias: Array | None = None, *, activation: str | None = None,
    backend: str | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """One token of `causal_conv1d`, or a few.

    Args:
        x: Inputs, ``(b, d)``, or ``(b, t, d)`` for a few tokens at once.
        weight: ``(d, w)``.
        state: The last inputs, ``(b, d, w-1)``.
        bias: ``(d,)``.
        activation: None or ``"silu"``.
        backend: None picks the first that can run. A named one runs, or raises with its reason.

    Returns:
        ``(y, state)``: ``y`` like ``x``; a new window like ``state``.

    Raises:
        ArgumentError: As `causal_conv1d`.

    Example:
        >>> import numpy as np
        >>> from refold.ops import causal_conv1d_step
        >>> y, state = causal_conv1d_step(np.ones((1, 1)), np.ones((1, 3)), np.array([[[2.0, 5.0]]]))
        >>> y.tolist(), state.tolist()
        ([[8.0]], [[[5.0, 1.0]]])
    """
    return call(STEP, (x, weight, state, bias), (activation,), backend)


def causal_conv1d_step_(
    x: Array, weight: Array, state: Array, bias: Array | None = None, *, activation: str | None = None,
    backend: str | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Compute `causal_conv1d_step`, overwrite ``state`` with the new state, and return it. There is no gradient."""
    return call_in_place(STEP, (x, weight, state, bias), (activation,), backend), state
