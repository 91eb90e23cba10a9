"""The definition of the delta rule: NumPy, float64, one token after the other."""

from __future__ import annotations

import numpy as np
from numpy import ndarray


def delta_rule(
    q: ndarray, k: ndarray, v: ndarray, g: ndarray | None = None, beta: ndarray | None = None,
    r: ndarray | None = None, A_log: ndarray | None = None, dt_bias: ndarray | None = None,
    initial_state: ndarray | None = None, cu_seqlens: ndarray | None = None, scale: float | None = None,
    normalize: bool = False, lower_bound: float | None = None, beta_limit: float | None = None, erase: bool = True,
    chunk_size: int | None = None,
) -> tuple[ndarray, ndarray]:  # fmt: skip
    """Return ``y`` and the last state of each sequence; the chunk size changes nothing."""
    q, k, v = (a.astype(np.float64) for a in (q, k, v))
    if normalize:
        q, k = (a / np.sqrt((a * a).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
    (batch, seqlen, nheads, _), dkey = v.shape, q.shape[3]
    q, k = (np.repeat(a, nheads // a.shape[2], axis=2) for a in (q, k))  # (b, t, h, n)
    read = k if r is None else r.astype(np.float64)
    beta = np.ones(v.shape[:3]) if beta is None else beta.astype(np.float64)
    beta = beta if beta_limit is None else beta_limit * sigmoid(beta)
    decay = np.ones((*v.shape[:3], 1)) if g is None else np.exp(log_decay(g, A_log, dt_bias, lower_bound))
    ends = [seqlen] * batch if cu_seqlens is None else cu_seqlens[1:].tolist()
    starts = [0] * batch if cu_seqlens is None else cu_seqlens[:-1].tolist()

    y, states = np.zeros_like(v), np.zeros((len(starts), nheads, dkey, v.shape[3]))
    if initial_state is not None:
        states[:] = initial_state
    for s, (start, end) in enumerate(zip(starts, ends, strict=True)):
        row, S = (s if cu_seqlens is None else 0), states[s]  # S (h, n, p)
        for t in range(start, end):
            S *= decay[row, t][:, :, None]
            found = np.einsum("hnp,hn->hp", S, read[row, t]) if erase else 0.0
            S += k[row, t][:, :, None] * (beta[row, t][:, None] * (v[row, t] - found))[:, None, :]
            y[row, t] = np.einsum("hnp,hn->hp", S, q[row, t])
    return y * (dkey**-0.5 if scale is None else scale), states


def delta_rule_step(q, k, v, state, g=None, beta=None, r=None, A_log=None, dt_bias=None, **options):
    """Return ``y`` and the state after one token, or a few if the inputs have a time axis."""
    one = v.ndim == 3
    q, k, v, g, beta, r = (a[:, None] if one and a is not None else a for a in (q, k, v, g, beta, r))
    y, state = delta_rule(q, k, v, g, beta, r, A_log, dt_bias, state, **options)
    return y[:, 0] if one else y, state


def log_decay(g: ndarray, A_log: ndarray | None, dt_bias: ndarray | None, bound: float | None) -> ndarray:
    """Return g (b, t, h, 1 or n) with its bias, or -exp(A_log) softplus(g), or bound * sigmoid(exp(A_log) g)."""
    bias, rate = (0.0 if a is None else a.reshape(len(a), -1).astype(np.float64) for a in (dt_bias, A_log))
    g, rate = g.astype(np.float64).reshape(*g.shape[:3], -1) + bias, np.exp(rate)
    return bound * sigmoid(rate * g) if bound is not None else g if A_log is None else -rate * np.logaddexp(0.0, g)


def sigmoid(v: ndarray) -> ndarray:
    """Return the logistic function."""
    return 0.5 + 0.5 * np.tanh(0.5 * v)
