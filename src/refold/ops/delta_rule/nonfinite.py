"""Which results and gradients of the delta rule are not finite by its definition.

Formulas in chunks multiply tokens by masks, and zero times NaN is NaN: one bad token would spoil earlier ones. So
values that are not finite are replaced by zero there, and the results that the definition spoils are marked here.

Column ``p`` of a state meets no other column. Within a column, reading mixes all keys: ``u = beta (v - Sᵀr)``. So if
the rule erases, one bad element of a state spoils its whole column at the next token, and the same holds for the
gradient of a state at the token before. If it does not erase, an element of a state meets its own decay alone. With
S[t] the state after a token, D[t] its gradient, E[t] the one before the token writes, and S'[t] the decayed state::

    y[t]    reads S[t], q[t]                dq[t]    reads S[t], dy[t]
    dv[t]   reads D[t], k[t], beta[t]       dk[t]    reads D[t], v[t], beta[t] and, if it erases, r[t], S'[t]
    dr[t]   reads D[t], k[t], beta[t], S'[t]
    dbeta[t] reads D[t], k[t], v[t] and, if it erases, r[t], S'[t]
    dg[t]   reads S[t-1], E[t] and the decay itself
"""

from __future__ import annotations

from dataclasses import dataclass

from refold.ops.lines import NEVER_AFTER, NEVER_BEFORE, Array, Line, by_head


@dataclass
class Bad:
    """Where the operands of the recurrence are not finite, after all that comes before it.

    Attributes:
        q: ``(b, t, g, n)``; likewise k.
        k: See q.
        r: The read keys, (b, t, h, n); None if they are k.
        v: ``(b, t, h, p)``.
        beta: ``(b, t, h)``, or None.
        g: The log decays, (b, t, h, 1 or n): NaN or infinite; one of -inf is a decay of zero. Or None.
        initial: The initial states, (k, h, n, p), or None.
        erase: Whether what is read is erased.
        dy: The gradient of y, (b, t, h, p); None in a forward pass.
        dfinal: The gradient of the final states, (k, h, n, p), or None.
    """

    q: Array
    k: Array
    r: Array | None
    v: Array
    beta: Array | None
    g: Array | None
    initial: Array | None
    erase: bool
    dy: Array | None = None
    dfinal: Array | None = None


def spoiled_results(line: Line, bad: Bad) -> tuple[Array, Array]:
    """Mark which of y (b, t, h, p) and of the final states (k, h, n, p) the definition makes not finite."""
    xp = line.xp
    first = _first_bad_state(line, bad)
    y = (line.tokens(4) >= line.spread(xp.amin(first, -2))) | _by_head(line, bad, bad.q).any(-1)[..., None]
    return y, first <= _end(line, bad)[:, None, None, None]


def spoiled_gradients(line: Line, bad: Bad) -> dict[str, Array]:
    """Mark which gradients of q, k, r, v, beta, g and the initial states are not finite, by the names of arguments.

    Those of q and k are of heads, (b, t, h, n), and that of k is without its share as a read key.
    """
    assert bad.dy is not None, "gradients have a gradient of y, if it is zero"
    xp, token = line.xp, line.tokens(4)
    first, last = _first_bad_state(line, bad), _last_bad_gradient(line, bad)
    any_n, any_p = (lambda a, end: end(a, -2)), (lambda a, end: end(a, -1))
    k = _by_head(line, bad, bad.k).any(-1)[..., None]  # (b, t, h, 1)
    r = k if bad.r is None else bad.r  # (b, t, h, 1 or n)
    beta = xp.zeros_like(k) if bad.beta is None else bad.beta[..., None]
    g = xp.zeros_like(k) if bad.g is None else bad.g

    entering = token > line.spread(any_p(first, xp.amin))  # S[t-1], by key (b, t, h, n)
    read = token > line.spread(any_n(first, xp.amin)) if bad.erase else xp.zeros_like(bad.v)
    read = read | ((r.any(-1) | g.any(-1))[..., None] if bad.erase else False)  # Sᵀr, by column (b, t, h, p)
    leaving = token <= line.spread(any_p(last, xp.amax))  # D[t], by key
    columns = token <= line.spread(any_n(last, xp.amax))  # D[t], by column
    v = columns | k | beta
    before = leaving | r | v.any(-1)[..., None] if bad.erase else leaving  # E[t] = D[t] - r (beta D[t]ᵀk)ᵀ, by key
    u = bad.v | beta | read
    return {
        "q": (token >= line.spread(any_p(first, xp.amin))) | bad.dy.any(-1)[..., None],
        "k": leaving | u.any(-1)[..., None],
        "r": entering | g | v.any(-1)[..., None],
        "v": v,
        "beta": (columns | k | bad.v | read).any(-1),
        "g": entering | before | g,
        "initial_state": last >= _begin(line, bad)[:, None, None, None],
    }


def _first_bad_state(line: Line, bad: Bad) -> Array:
    """Find the token from which on a state is not finite, (k, h, n, p)."""
    xp = line.xp
    k = line.first(_by_head(line, bad, bad.k))[..., None]  # (k, h, n, 1)
    first = xp.minimum(k, line.first(bad.v)[..., None, :])
    if bad.beta is not None:
        first = xp.minimum(first, line.first(bad.beta)[..., None, None])
    if bad.g is not None:
        first = xp.minimum(first, line.first(bad.g)[..., None])
    first = first if bad.initial is None else xp.where(bad.initial, _begin(line, bad)[:, None, None, None], first)
    if not bad.erase:
        return first
    # A bad element spoils its column where that is read next, a bad read key or decay all columns at once.
    column = xp.amin(first, -2)[..., None, :] + 1
    for tokens in (_by_head(line, bad, bad.k) if bad.r is None else bad.r, bad.g):
        if tokens is not None:
            column = xp.minimum(column, xp.amin(line.first(tokens), -1)[..., None, None])
    return xp.minimum(first, column)


def _last_bad_gradient(line: Line, bad: Bad) -> Array:
    """Find the token up to which the gradient of the state after it is not finite, (k, h, n, p)."""
    xp = line.xp
    q = line.last(_by_head(line, bad, bad.q))[..., None]  # (k, h, n, 1)
    last = xp.maximum(q, line.last(bad.dy)[..., None, :])
    for tokens in (bad.g, bad.r):
        if tokens is not None:
            last = xp.maximum(last, _before(xp, line.last(tokens)[..., None]))
    end = _end(line, bad)[:, None, None, None]
    last = last if bad.dfinal is None else xp.where(bad.dfinal, end, last)
    if not bad.erase:
        return last
    column = _before(xp, xp.amax(last, -2)[..., None, :])
    k = line.last(_by_head(line, bad, bad.k))
    column = xp.maximum(column, _before(xp, xp.amax(k, -1)[..., None, None]))
    if bad.beta is not None:
        column = xp.maximum(column, _before(xp, line.last(bad.beta)[..., None, None]))
    return xp.maximum(last, column)


def _before(xp: object, token: Array) -> Array:
    """Take one from a number of a token; none stays none."""
    return xp.where(token < 0, NEVER_BEFORE, token - 1)  # type: ignore[attr-defined]


def _end(line: Line, bad: Bad) -> Array:
    """Find the last token of each sequence, (k,); -1 of an empty one."""
    there = line.xp.ones_like(bad.v[..., 0, 0])
    return line.xp.clip(line.last(there), -1)


def _begin(line: Line, bad: Bad) -> Array:
    """Find the token before the first one of each sequence, (k,); -1 of an empty one."""
    first = line.first(line.xp.ones_like(bad.v[..., 0, 0]))
    return line.xp.where(first == NEVER_AFTER, 0, first) - 1


def _by_head(line: Line, bad: Bad, groups: Array) -> Array:
    return by_head(line.xp, groups, bad.v.shape[2], 2)
