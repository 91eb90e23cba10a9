"""The functions of flash-linear-attention (package fla-core 0.6) for the delta rule and gated linear attention.

Arguments, defaults, layouts and the number of results are that package's. What says only how its kernels are launched
has no effect here. What has a meaning that these functions do not compute raises an error that names it. They take
float32 and any device where that package does not, and have gradients where its recurrent ones have none.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor

from refold import ops
from refold.compat.checks import positive, shaped, tensors
from refold.errors import ArgumentError

__all__ = [
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gla",
    "chunk_kda",
    "chunk_simple_gla",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_kda",
]


@tensors()
def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, chunk_indices: Tensor | None = None,
    cp_context: Any = None, *, use_gate_in_kernel: bool = False, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, chunk_size: int = 64, transpose_state_layout: bool | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Gated delta rule: `refold.ops.gated_delta_rule` with this package's arguments.

    Args:
        q: Queries, ``(b, t, g, n)``.
        k: Keys, ``(b, t, g, n)``.
        v: Values, ``(b, t, h, p)``.
        g: Log decays, ``(b, t, h)``; with ``use_gate_in_kernel`` the gates that they come from.
        beta: Strengths, ``(b, t, h)``.
        scale: Factor of the queries; None is n ** -0.5.
        initial_state: ``(k, h, n, p)``, or ``(k, h, p, n)`` with ``state_v_first``.
        output_final_state: Return the final state, float32, in the same layout.
        use_qk_l2norm_in_kernel: Divide q and k by their lengths.
        use_beta_sigmoid_in_kernel: The strength is sigmoid(beta).
        allow_neg_eigval: The strength is twice that.
        state_v_first: States are ``(p, n)``.
        cu_seqlens: Offsets of a pack, ``(k + 1,)``.
        cu_seqlens_cpu: No effect.
        chunk_indices: No effect.
        cp_context: Refused.
        use_gate_in_kernel: The log decay is -exp(A_log) * softplus(g + dt_bias).
        A_log: ``(h,)``.
        dt_bias: ``(h,)``.
        chunk_size: Tokens per chunk; it changes speed and rounding only.
        transpose_state_layout: The former name of ``state_v_first``.

    Returns:
        ``(o, final_state)``: ``o`` like ``v``; ``final_state`` is None unless it is asked for.

    Raises:
        ArgumentError: Options contradict one another, or one is not computed here; the message names it.
        ShapeError: Axes disagree.
    """
    op = "chunk_gated_delta_rule"
    _refuse(op, cp_context=cp_context)
    v_first = _v_first(op, state_v_first, transpose_state_layout)
    gates = _gates(op, use_gate_in_kernel, g, A_log, dt_bias)
    limit = _limit(op, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    positive(op, "chunk_size", chunk_size)
    return _run(
        q, k, v, v_first, output_final_state, initial_state, g=g, beta=beta, scale=scale, cu_seqlens=cu_seqlens,
        normalize=use_qk_l2norm_in_kernel, beta_limit=limit, chunk_size=chunk_size, **gates,
    )  # fmt: skip


@tensors(q=(4,), g=(3,), gk=(4,))
def fused_recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, gk: Tensor | None = None, gv: Tensor | None = None,
    beta: Tensor | None = None, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None, dt_bias: Tensor | None = None, use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None, *,
    transpose_state_layout: bool | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Gated delta rule for few tokens: as `chunk_gated_delta_rule`, but for the order of the arguments.

    ``gk``, ``(b, t, h, n)``, are log decays per key, added to those of ``g``. ``beta`` is 1 if it is None. Log decays
    per value, ``gv``, are refused.
    """
    op = "fused_recurrent_gated_delta_rule"
    _refuse(op, gv=gv)
    v_first = _v_first(op, state_v_first, transpose_state_layout)
    gates = _gates(op, use_gate_in_kernel, g, A_log, dt_bias)
    limit = _limit(op, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    if beta is None and limit is not None:
        raise ArgumentError(f"{op}: use_beta_sigmoid_in_kernel=True needs beta; got None. Pass beta.")
    if gk is not None and g is not None:
        if use_gate_in_kernel:
            raise ArgumentError(f"{op}: use_gate_in_kernel=True takes g alone; got gk, too. Leave gk out.")
        shaped(op, gk=(gk, (*g.shape, gk.shape[-1])))
        g = g.unsqueeze(-1) + gk
    return _run(
        q, k, v, v_first, output_final_state, initial_state, g=gk if g is None else g, beta=beta, scale=scale,
        cu_seqlens=cu_seqlens, normalize=use_qk_l2norm_in_kernel, beta_limit=limit, **gates,
    )  # fmt: skip


@tensors(g=(4,), beta=(3,))
def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    safe_gate: bool = False, lower_bound: float | None = None, disable_recompute: bool = False,
    return_intermediate_states: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, cp_context: Any = None, use_graph: bool = False,
    max_num_seqs: int | None = None, *, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    chunk_size: int = 64, transpose_state_layout: bool | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Kimi delta attention: `refold.ops.kda` with this package's arguments.

    As `chunk_gated_delta_rule`, with ``g`` per key, ``(b, t, h, n)``. With ``use_gate_in_kernel``, the log decay is
    -exp(A_log) * softplus(g + dt_bias), or with a ``lower_bound`` lower_bound * sigmoid(exp(A_log) * (g + dt_bias));
    ``dt_bias`` has ``h n`` elements. ``safe_gate``, ``disable_recompute``, ``use_graph`` and ``max_num_seqs`` have no
    effect: gates of any size are safe here. ``return_intermediate_states`` and ``cp_context`` are refused.
    """
    op = "chunk_kda"
    _refuse(op, cp_context=cp_context, return_intermediate_states=return_intermediate_states or None)
    if safe_gate and use_gate_in_kernel and (lower_bound is None or not -5 <= lower_bound < 0):
        raise ArgumentError(
            f"{op}: safe_gate=True needs a lower_bound from -5 to below 0; got {lower_bound!r}. Pass it."
        )
    positive(op, "chunk_size", chunk_size)
    return _kda(
        op, q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound,
        _v_first(op, state_v_first, transpose_state_layout), cu_seqlens, chunk_size,
    )  # fmt: skip


@tensors(g=(4,), beta=(3,))
def fused_recurrent_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, lower_bound: float | None = None,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None, *, transpose_state_layout: bool | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Kimi delta attention for few tokens: as `chunk_kda`, but for the order of the arguments.

    A ``beta`` per value, ``(b, t, h, p)``, is refused.
    """
    op = "fused_recurrent_kda"
    return _kda(
        op, q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound,
        _v_first(op, state_v_first, transpose_state_layout), cu_seqlens, None,
    )  # fmt: skip


@tensors(g=(4,))
def chunk_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Gated linear attention: `refold.ops.gla` with log decays per key ``g``, ``(b, t, h, n)``.

    The other arguments and the results are those of `chunk_gated_delta_rule`.
    """
    return _run(
        q, k, v, state_v_first, output_final_state, initial_state, g=g, scale=scale, cu_seqlens=cu_seqlens, erase=False
    )


@tensors(v=(4,), g_gamma=(1,))
def chunk_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, *, chunk_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Linear attention with one decay per head: ``g`` (b, t, h), or ``g_gamma`` (h,), the same at each token, or none.

    The other arguments and the results are those of `chunk_gated_delta_rule`.
    """
    op = "chunk_simple_gla"
    if g is not None and g_gamma is not None:
        raise ArgumentError(f"{op}: of g and g_gamma, only one may be given; got both. Pass their sum as g.")
    if g_gamma is not None:
        g = g_gamma.expand(*v.shape[:2], -1)
    if chunk_size is not None:
        positive(op, "chunk_size", chunk_size)
    return _run(
        q, k, v, state_v_first, output_final_state, initial_state, g=g, scale=scale, cu_seqlens=cu_seqlens, erase=False,
        chunk_size=chunk_size,
    )  # fmt: skip


@tensors()
def chunk_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, *, chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Delta rule without decay: `refold.ops.delta_rule` with this package's arguments.

    The arguments and the results are those of `chunk_gated_delta_rule`.
    """
    positive("chunk_delta_rule", "chunk_size", chunk_size)
    return _run(
        q, k, v, False, output_final_state, initial_state, beta=beta, scale=scale, cu_seqlens=cu_seqlens,
        normalize=use_qk_l2norm_in_kernel, chunk_size=chunk_size,
    )  # fmt: skip


def _kda(
    op: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
    scale: float | None, initial_state: Tensor | None, output_final_state: bool, normalize: bool, use_gate: bool,
    use_sigmoid: bool, allow_neg_eigval: bool, lower_bound: float | None, v_first: bool, cu_seqlens: Tensor | None,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    bound = lower_bound if use_gate else None
    if dt_bias is not None and dt_bias.numel() == g.shape[2] * g.shape[3]:
        dt_bias = dt_bias.reshape(g.shape[2:])
    gates = _gates(op, use_gate, g, A_log, dt_bias, bound)
    limit = _limit(op, use_sigmoid, allow_neg_eigval)
    return _run(
        q, k, v, v_first, output_final_state, initial_state, g=g, beta=beta, scale=scale, cu_seqlens=cu_seqlens,
        normalize=normalize, beta_limit=limit, lower_bound=bound, chunk_size=chunk_size, **gates,
    )  # fmt: skip


def _run(
    q: Tensor, k: Tensor, v: Tensor, v_first: bool, output_final_state: bool, initial_state: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    if v_first and initial_state is not None:
        initial_state = initial_state.mT
    y, state = ops.delta_rule(q, k, v, initial_state=initial_state, **options)
    if not output_final_state:
        return y, None
    return y, state.mT.contiguous() if v_first else state


def _gates(
    op: str, use_gate: bool, g: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None, bound: float | None = None
) -> dict[str, Tensor | None]:
    """Choose the parameters of the gate; without one, that package does not look at them."""
    if not use_gate:
        return {}
    if A_log is None and bound is None:
        raise ArgumentError(f"{op}: use_gate_in_kernel=True needs A_log; got None. Pass A_log.")
    if g is None:
        raise ArgumentError(f"{op}: use_gate_in_kernel=True needs the gates g; got None. Pass g.")
    return {"A_log": None if A_log is None else A_log.flatten(), "dt_bias": dt_bias}


def _limit(op: str, sigmoid: bool, allow_neg_eigval: bool) -> float | None:
    """Choose the upper limit of the strengths, if they come as gates."""
    if allow_neg_eigval and not sigmoid:
        raise ArgumentError(f"{op}: allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True; got False. Set it.")
    return (2.0 if allow_neg_eigval else 1.0) if sigmoid else None


def _refuse(op: str, **given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise ArgumentError(f"{op}: {name} is not computed here; got {type(value).__name__}. Leave {name} out.")


def _v_first(op: str, state_v_first: bool, former: bool | None) -> bool:
    if former is None:
        return state_v_first
    if state_v_first:
        raise ArgumentError(f"{op}: transpose_state_layout is state_v_first; got both. Pass state_v_first alone.")
    warnings.warn("transpose_state_layout is now named state_v_first.", DeprecationWarning, stacklevel=3)
    return former
