"""How tokens lie in sequences, and the first and the last of them where something holds.

A value that is not finite spoils all later tokens of its sequence, and its gradient all earlier ones. So the first bad
token of a state, and the last bad one of its gradient, say which results are not finite. Arrays are those of torch or
JAX; ``xp`` is the module that has their functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Array = Any
NEVER_AFTER, NEVER_BEFORE = 1 << 30, -2
"""The first bad token, and the last one, where there is none. Token -1 is a bad initial state."""


@dataclass
class Line:
    """How tokens (b, t, ...) lie in sequences (k, ...): a sequence a batch row, or a pack.

    Attributes:
        xp: ``torch`` or ``jax.numpy``.
        token: The number of each token, (1, t).
        least: Takes (b, t, ...) to the least of each sequence, (k, ...).
        most: Likewise the greatest.
        spread: Takes (k, ...) to what each token's sequence has, (b, t, ...); the batch may be one.
    """

    xp: Any
    token: Array
    least: Callable[[Array], Array]
    most: Callable[[Array], Array]
    spread: Callable[[Array], Array]

    def tokens(self, rank: int) -> Array:
        """Return the number of each token, to be compared with an array of ``rank`` axes."""
        return self.token.reshape(1, -1, *[1] * (rank - 2))

    def first(self, bad: Array) -> Array:
        """Return the first token of each sequence where ``bad`` (b, t, ...) holds, (k, ...)."""
        return self.least(self.xp.where(bad, self.tokens(bad.ndim), NEVER_AFTER))

    def last(self, bad: Array) -> Array:
        """Return the last one."""
        return self.most(self.xp.where(bad, self.tokens(bad.ndim), NEVER_BEFORE))


def by_head(xp: Any, groups: Array, nheads: int, axis: int) -> Array:
    """Repeat an axis over groups for the heads of each."""
    before, ngroups, after = groups.shape[:axis], groups.shape[axis], groups.shape[axis + 1 :]
    repeat = nheads // ngroups
    wide = xp.broadcast_to(groups.reshape(*before, ngroups, 1, *after), (*before, ngroups, repeat, *after))
    return wide.reshape(*before, nheads, *after)
