"""The definition of the delta rule."""

from __future__ import annotations

from refold.ops.definition import Array, library, one_token, per_head, sigmoid, softplus, walk, wide


def delta_rule(
    q: Array, k: Array, v: Array, g: Array | None = None, beta: Array | None = None,
    r: Array | None = None, A_log: Array | None = None, dt_bias: Array | None = None,
    initial_state: Array | None = None, cu_seqlens: Array | None = None, scale: float | None = None,
    normalize: bool = False, lower_bound: float | None = None, beta_limit: float | None = None, erase: bool = True,
    chunk_size: int | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Return ``y`` and the last state of each sequence; the chunk size changes nothing."""
    q, k, v, g, beta, r, A_log, bias, initial = wide(q, k, v, g, beta, r, A_log, dt_bias, initial_state)
    if normalize:
        q, k = (a / ((a * a).sum(-1)[..., None] + 1e-6) ** 0.5 for a in (q, k))
    of, (nheads, nvalues), nkeys = library(v), v.shape[2:], q.shape[3]
    q, k = (per_head(a, nheads) for a in (q * (nkeys**-0.5 if scale is None else scale), k))  # (b, t, h, n)
    read = k if r is None else r
    beta = beta_limit * sigmoid(beta) if beta is not None and beta_limit is not None else beta
    decay = None if g is None else of.exp(log_decay(g, A_log, bias, lower_bound))

    def step(row: int, t: int, S: Array) -> tuple[Array, Array]:  # S (h, n, p)
        S = S if decay is None else decay[row, t][:, :, None] * S
        u = v[row, t] - of.einsum("hnp,hn->hp", S, read[row, t]) if erase else v[row, t]
        u = u if beta is None else beta[row, t][:, None] * u
        S = S + k[row, t][:, :, None] * u[:, None, :]
        return of.einsum("hnp,hn->hp", S, q[row, t]), S

    return walk(v, cu_seqlens, initial, (nheads, nkeys, nvalues), step)


def delta_rule_step(q, k, v, state, g=None, beta=None, r=None, A_log=None, dt_bias=None, **options):
    """Return ``y`` and the state after one token, or a few if the inputs have a time axis."""
    timed, rest = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "r": r}, {"A_log": A_log, "dt_bias": dt_bias}
    return one_token(delta_rule, timed, v.ndim == 3, initial_state=state, **rest, **options)


def log_decay(g: Array, A_log: Array | None, dt_bias: Array | None, bound: float | None) -> Array:
    """Return g (b, t, h, 1 or n) with its bias, or -exp(A_log) softplus(g), or bound * sigmoid(exp(A_log) g)."""
    bias, rate = (None if a is None else a.reshape(len(a), -1) for a in (dt_bias, A_log))
    g = g.reshape(*g.shape[:3], -1)
    g, rate = g if bias is None else g + bias, None if rate is None else library(g).exp(rate)
    if bound is not None:
        return bound * sigmoid(g if rate is None else rate * g)
    return g if rate is None else -rate * softplus(g)
