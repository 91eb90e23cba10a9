"""Which results and gradients of the Mamba-2 scan are not finite by its definition (design decision 16).

Formulas in chunks multiply tokens by masks, and zero times NaN is NaN: one bad token would spoil earlier ones. So
values that are not finite are replaced by zero there, and the results that the definition spoils are marked here. In
the definition, a bad x, B or decay spoils the states of its channel from its token to the end of the sequence. A bad C,
decay or gradient of a result spoils the gradients of states from its token back to the beginning. With S[t] the state
and L[t] its gradient, both (h, p, n),

    y[t] reads S[t] and C[t]              dX[t] reads L[t] and B[t]           X = step * x
    dB[t] reads L[t] and X[t]             dC[t] reads S[t] and dy[t]
    d(log decay)[t] reads L[t], S[t-1] and the decay itself

So the first bad token of each state, and the last bad token of each gradient, determine everything. Arrays are those of
torch or JAX. Each of the k sequences has a first and a last bad token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from refold.ops.lines import NEVER_AFTER, NEVER_BEFORE, Array, Line, by_head


@dataclass
class Bad:
    """Where the operands of a scan are not finite.

    Attributes:
        X: Step size times x, (b, t, h, p).
        decay: The decay of a token: NaN or infinite, (b, t, h). A log decay of -inf is a decay of zero.
        B: ``(b, t, g, n)``.
        C: ``(b, t, g, n)``.
        initial: The initial states, (k, h, p, n), or None.
        dy: The gradient of y, (b, t, h, p); None in a forward pass.
        dfinal: The gradient of the final states, (k, h, p, n), or None.
    """

    X: Array
    decay: Array
    B: Array
    C: Array
    initial: Array | None
    dy: Array | None = None
    dfinal: Array | None = None


def spoiled_results(line: Line, bad: Bad) -> tuple[Array, Array]:
    """Return which of y (b, t, h, p) and of the final states (k, h, p, n) the definition makes not finite."""
    xp = line.xp
    first = _first_bad_state(line, bad)
    y = line.tokens(4) >= line.spread(xp.amin(first, -1))
    C = by_head(xp, bad.C.any(-1), bad.X.shape[2], 2)[..., None]
    return y | C, first < NEVER_AFTER


def spoiled_gradients(line: Line, bad: Bad) -> dict[str, Array]:
    """Return which gradients of X, B, C, the log decays and the initial states are not finite; and which of y."""
    xp, token = line.xp, line.tokens
    ngroups = bad.B.shape[2]
    first, last = _first_bad_state(line, bad), _last_bad_gradient(line, bad)

    def of_group(heads: Array, reduce: Callable[..., Array]) -> Array:
        """(..., h, n) -> (..., g, n)."""
        return reduce(heads.reshape(*heads.shape[:-2], ngroups, -1, heads.shape[-1]), -2)

    def any_of_group(bad: Array) -> Array:
        """(b, t, h, p) -> (b, t, g, 1)."""
        return bad.reshape(*bad.shape[:2], ngroups, -1).any(-1)[..., None]

    B = by_head(xp, bad.B.any(-1), bad.X.shape[2], 2)[..., None]
    least, most = xp.amin(first, -2), xp.amax(last, -2)  # (k, h, n)
    y, _ = spoiled_results(line, bad)
    log_decay = (token(3) <= line.spread(xp.amax(most, -1))) | (token(3) > line.spread(xp.amin(least, -1)))
    return {
        "y": y,
        "X": (token(4) <= line.spread(xp.amax(last, -1))) | B,
        "B": (token(4) <= line.spread(of_group(most, xp.amax))) | any_of_group(bad.X),
        "C": (token(4) >= line.spread(of_group(least, xp.amin))) | any_of_group(bad.dy),
        "log_decay": log_decay | bad.decay,
        "initial_state": last > NEVER_BEFORE,
    }


def _first_bad_state(line: Line, bad: Bad) -> Array:
    """Return the token from which on a state is not finite, (k, h, p, n)."""
    xp, nheads = line.xp, bad.X.shape[2]
    X, decay = line.first(bad.X)[..., None], line.first(bad.decay)[..., None, None]
    B = by_head(xp, line.first(bad.B), nheads, 1)[:, :, None]
    first = xp.minimum(xp.minimum(X, decay), B)
    return first if bad.initial is None else xp.where(bad.initial, -1, first)


def _last_bad_gradient(line: Line, bad: Bad) -> Array:
    """Return the token up to which the gradient of a state is not finite, (k, h, p, n)."""
    xp, nheads = line.xp, bad.X.shape[2]
    dy, decay = line.last(bad.dy)[..., None], line.last(bad.decay)[..., None, None] - 1
    C = by_head(xp, line.last(bad.C), nheads, 1)[:, :, None]
    last = xp.maximum(xp.maximum(dy, xp.where(decay < -1, NEVER_BEFORE, decay)), C)
    return last if bad.dfinal is None else xp.where(bad.dfinal, NEVER_AFTER, last)
