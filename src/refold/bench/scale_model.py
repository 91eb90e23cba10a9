"""A model of time for sequences that ranks share, fitted to measured rows.

A call over n ranks takes::

    T(n) = max((1 + s) P + E + (n - 1) g, H)

P is the time of one rank with as many tokens. s is the share of P that waits for the slowest rank and additions to all
tokens take. E is what a call adds, whatever the tokens. g is what each further rank adds, above all to the all-gather.
H is the time of the host. All are in seconds, but for s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .rows import Row, measured, stored

LONG = {False: 131072, True: 32768}
"""Tokens of a rank from which a GPU, not the host, tells how long an operator takes, and a model."""
BETWEEN_HOSTS = 50e9
"""Bytes per second that a rank receives from other hosts: an assumption."""


class SharedCall(NamedTuple):
    """A measured call that ranks share, next to the call of one rank."""

    op: str
    kind: str
    ranks: int
    tokens: int
    """Of each rank."""
    seconds: float
    alone: float | None
    """Seconds of one rank with as many tokens."""
    whole: float | None
    """Seconds of one rank with the whole sequence."""
    row: Row

    @property
    def long(self) -> bool:
        """Whether a rank has so many tokens that the GPU tells how long the call takes."""
        return self.tokens >= LONG["layers" in self.row]

    @property
    def weak(self) -> float | None:
        """Weak-scaling efficiency: 1 if a longer sequence on more ranks takes no more time."""
        return None if self.alone is None else self.alone / self.seconds

    @property
    def strong(self) -> float | None:
        """Strong-scaling efficiency: 1 if n ranks take an n-th of the time."""
        return None if self.whole is None else self.whole / self.seconds / self.ranks


class Fit(NamedTuple):
    """What was fitted for an operator or model and a pass."""

    share: float
    call: float
    rank: float
    host: float

    def seconds(self, alone: float, ranks: int, rank: float | None = None) -> float:
        """Return the time over ``ranks`` of what takes one rank ``alone`` seconds; ``rank`` replaces the fitted g."""
        each = self.rank if rank is None else rank
        return max((1 + self.share) * alone + self.call + (ranks - 1) * each, self.host)


def rows(results: Path, gpu: str) -> list[Row]:
    """Return the stored rows of both suites on a kind of GPU."""
    return stored(results, gpu, "scale", "scale-models")


def groups(rows: Sequence[Row]) -> list[list[SharedCall]]:
    """Return the calls that share states, a list per operator or model and pass."""
    return [list(group) for _, group in groupby(shared(rows), key=lambda each: (each.op, each.kind))]


def shared(rows: Sequence[Row], way: str = "") -> list[SharedCall]:
    """Return the calls of ranks that share a sequence, by states or another way, in the order of a table."""
    times = {(row["op"], row["pass"], row["backend"], row["tokens"]): row["median_s"] for row in rows if measured(row)}
    found = []
    for row in rows:
        count, _, rest = row["backend"].partition(" ranks")
        if measured(row) and count != "1" and rest.removeprefix(", ") == way:
            ranks, (op, kind, tokens) = int(count), (row["op"], row["pass"], row["tokens"])
            alone, whole = (times.get((op, kind, "1 ranks", n)) for n in (tokens // ranks, tokens))
            found.append(SharedCall(op, kind, ranks, tokens // ranks, row["median_s"], alone, whole, row))
    return sorted(found, key=lambda each: ("layers" in each.row, each.op, each.kind, each.tokens, each.ranks))


def fit(calls: Sequence[SharedCall]) -> Fit:
    """Fit the model to calls of one operator or model and pass, by least squares of relative errors."""
    known = [each for each in calls if each.alone is not None]
    long = [each for each in known if each.long]
    parts = np.array([[1.0, 1 / each.alone, (each.ranks - 1) / each.alone] for each in long if each.alone])
    share, call, rank = np.linalg.lstsq(parts, [each.seconds / (each.alone or math.nan) - 1 for each in long], None)[0]
    short = [each.seconds for each in known if not each.long]
    return Fit(float(share), float(call), float(rank), min(short, default=0.0))


def on_paper(calls: Sequence[SharedCall], tokens: int, ranks: int) -> tuple[float, float]:
    """Return seconds and weak-scaling efficiency of a call with so many tokens, over ranks of different hosts."""
    each = next(each for each in calls if each.tokens == tokens and each.alone is not None)
    alone = each.alone or math.nan
    took = fit(calls).seconds(alone, ranks, each.row["sent_bytes"] / (each.ranks - 1) / BETWEEN_HOSTS)
    return took, alone / took
