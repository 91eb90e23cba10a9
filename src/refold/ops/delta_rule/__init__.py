"""The delta rule: a state that corrects what it holds under a key. Core of gated DeltaNet, KDA, DeltaNet and GLA."""

from __future__ import annotations

from refold.ops.arrays import AnyArray, Array
from refold.ops.delta_rule.spec import SPEC, STEP
from refold.ops.dispatch import call, call_in_place

__all__ = ["delta_rule", "delta_rule_step", "delta_rule_step_"]


def delta_rule(
    q: Array, k: Array, v: Array, *, g: Array | None = None, beta: Array | None = None, r: Array | None = None,
    A_log: Array | None = None, dt_bias: Array | None = None, initial_state: Array | None = None,
    cu_seqlens: AnyArray | None = None, scale: float | None = None, normalize: bool = False,
    lower_bound: float | None = None, beta_limit: float | None = None, erase: bool = True,
    chunk_size: int | None = None, group: object = None, backend: str | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Compute the delta rule, with or without decay, and its linear relatives.

    Per batch row and head, with state S of shape (n, p) and S[-1] = initial_state::

        S'   = exp(g[t]) * S[t-1]                   (per head, or row by row where g is one per key)
        u    = beta[t] * (v[t] - S'ᵀ r[t])          (r is k if None; nothing is read with erase=False)
        S[t] = S' + k[t] ⊗ u
        y[t] = scale * S[t]ᵀ q[t]

    Before, ``normalize`` divides q and k by their lengths, z / sqrt(Σz² + 1e-6), and g and beta may come as gates::

        g = -exp(A_log) * softplus(g + dt_bias)                 with A_log
        g = lower_bound * sigmoid(exp(A_log) * (g + dt_bias))   with lower_bound, A_log or not
        beta = beta_limit * sigmoid(beta)                       with beta_limit

    Gated DeltaNet has g per head, KDA g per key, DeltaNet no g, GLA g per key and ``erase=False``.
    `refold.ops.gated_delta_rule`, `refold.ops.kda` and `refold.ops.gla` are these by name. Comba passes its own read
    keys; GDN-2 passes its erase gate times the keys as ``r``, and its write gate times the values as ``v``. The matrix
    memory of mLSTM is ``erase=False`` with its input gate as ``beta``, and with a column of ones in ``v`` for its
    normaliser; the running maximum of its exponential gates is the caller's.

    Args:
        q: Queries, ``(b, t, g, n)``; head ``i`` reads group ``i // (h / g)``.
        k: Keys, ``(b, t, g, n)``.
        v: Values, ``(b, t, h, p)``.
        g: Natural log of the decay, at most 0 in trained models, or the gate that it comes from: ``(b, t, h)``, or
            ``(b, t, h, n)`` for one decay per key.
        beta: Strength of each write, ``(b, t, h)``; 1 if None.
        r: Read keys, ``(b, t, h, n)``: what is erased where they are not the keys. Not normalised.
        A_log: Log of the rate of the gate, ``(h,)``.
        dt_bias: Added to the gate, ``(h,)``, or ``(h, n)`` for one per key.
        initial_state: ``(b, h, n, p)``; zeros if None. A state that is stored as (p, n) is passed as a transposed view.
        cu_seqlens: Packs sequences of different lengths along time: ``k + 1`` offsets, int32 or int64, from 0 to t,
            on the device of ``q``. The batch is then 1 and states are ``(k, h, n, p)``. A sequence may be empty.
        scale: Factor of the queries; None is n ** -0.5.
        normalize: Divide q and k by their lengths.
        lower_bound: A negative number: the gate is bounded, and g lies between it and 0.
        beta_limit: A positive number: beta is a gate, and the strength lies between 0 and it.
        erase: Whether a write first takes away what the state holds under the read key.
        chunk_size: Tokens per chunk, rounded up to a power of two. It changes speed and rounding only. None lets the
            backend choose.
        group: A process group, a 1-D device mesh or a `refold.parallel.Cut`: its ranks share the sequence, and
            each passes its own tokens. docs/scale.md says what is shared and how. PyTorch only.
        backend: None picks the first that can run. A named one runs, or raises with its reason.

    Returns:
        ``(y, state)``: ``y`` like ``v``; ``state`` ``(b, h, n, p)``, float32 (float64 for float64 inputs), the next
        call's initial_state.

    Raises:
        ShapeError: An axis disagrees; the message lists all sizes. Or an argument shapes another that is None.
        DtypeError: A dtype is not among those supported, or frameworks are mixed.
        DeviceError: Arrays live on different devices.
        ArgumentError: ``cu_seqlens`` or an option is inconsistent.
        BackendUnsupported: ``backend`` was named but cannot run; lists the reasons.

    Numerics:
        States and sums of log decays are float32 (float64 for float64 inputs); no decay is divided. Gradients flow to
        every array but ``cu_seqlens``, and from both results. With keys of length at most one and beta from 0 to 2, no
        state grows by erasing; longer keys may make it grow, by definition. docs/numerics.md shows measured errors.

    References:
        Yang, Kautz & Hatamizadeh, "Gated Delta Networks", 2024, arXiv:2412.06464. Kimi Team, "Kimi Linear", 2025,
        arXiv:2510.26692. Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length",
        2024, arXiv:2406.06484. Yang et al., "Gated Linear Attention Transformers", 2023, arXiv:2312.06635.

    Example:
        >>> import numpy as np
        >>> from refold.ops import delta_rule
        >>> q = k = np.ones((2, 64, 1, 8))
        >>> y, state = delta_rule(q, k, np.ones((2, 64, 4, 16)), beta=np.full((2, 64, 4), 0.5), normalize=True)
        >>> y.shape, state.shape, round(float(y[0, -1, 0, 0]), 4)
        ((2, 64, 4, 16), (2, 4, 8, 16), 0.3536)
    """
    arrays = (q, k, v, g, beta, r, A_log, dt_bias, initial_state, cu_seqlens)
    return call(SPEC, arrays, (scale, normalize, lower_bound, beta_limit, erase, chunk_size), backend, group)


def delta_rule_step(
    q: Array, k: Array, v: Array, state: Array, *, g: Array | None = None, beta: Array | None = None,
    r: Array | None = None, A_log: Array | None = None, dt_bias: Array | None = None, scale: float | None = None,
    normalize: bool = False, lower_bound: float | None = None, beta_limit: float | None = None, erase: bool = True,
    backend: str | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """One token of `delta_rule`, or a few.

    Computes exactly what `delta_rule` computes with ``initial_state=state``, so that decoding agrees with prefill.

    Args:
        q: Queries, ``(b, g, n)``, or ``(b, t, g, n)`` for a few tokens at once.
        k: Keys, like ``q``.
        v: Values, ``(b, h, p)`` or ``(b, t, h, p)``.
        state: ``(b, h, n, p)``, any float dtype; arithmetic is float32.
        g: Log decays or gates, ``(b, h)`` or ``(b, h, n)``; with a time axis after ``b`` if ``v`` has one.
        beta: Strengths, ``(b, h)`` or ``(b, t, h)``.
        r: Read keys, ``(b, h, n)`` or ``(b, t, h, n)``.
        A_log: As in `delta_rule`, likewise all that follows.
        dt_bias: See there.
        scale: See there.
        normalize: See there.
        lower_bound: See there.
        beta_limit: See there.
        erase: See there.
        backend: None picks the first that can run. A named one runs, or raises with its reason.

    Returns:
        ``(y, state)``: ``y`` like ``v``; a new state like ``state``.

    Raises:
        ArgumentError: As `delta_rule`.

    Example:
        >>> import numpy as np
        >>> from refold.ops import delta_rule_step
        >>> k = np.eye(8)[None, :1]
        >>> y, state = delta_rule_step(k, k, np.ones((1, 4, 16)), np.zeros((1, 4, 8, 16)), scale=1.0)
        >>> y.shape, float(y[0, 0, 0]), float(state[0, 0].sum())
        ((1, 4, 16), 1.0, 16.0)
    """
    arrays = (q, k, v, state, g, beta, r, A_log, dt_bias)
    return call(STEP, arrays, (scale, normalize, lower_bound, beta_limit, erase), backend)


def delta_rule_step_(
    q: Array, k: Array, v: Array, state: Array, *, g: Array | None = None, beta: Array | None = None,
    r: Array | None = None, A_log: Array | None = None, dt_bias: Array | None = None, scale: float | None = None,
    normalize: bool = False, lower_bound: float | None = None, beta_limit: float | None = None, erase: bool = True,
    backend: str | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Compute `delta_rule_step`, overwrite ``state`` with the new state, and return it. There is no gradient.

    A state of any strides is updated where it lies: one that is stored as (p, n) is passed as a transposed view.
    """
    arrays = (q, k, v, state, g, beta, r, A_log, dt_bias)
    return call_in_place(STEP, arrays, (scale, normalize, lower_bound, beta_limit, erase), backend), state
