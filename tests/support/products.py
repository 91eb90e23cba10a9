"""Which rows of a product `make test` runs: each value, and each pair of values, once. `make test-all` runs all."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def covering(rows: Sequence[Any], shows: Callable[[Any], Iterable[Hashable]]) -> list[int]:
    """Choose rows that show all that any row shows, the one that shows most first; their indices."""
    shown = [set(shows(row)) for row in rows]
    missing, chosen = set().union(*shown), []
    while missing:
        best = max(range(len(rows)), key=lambda i: len(shown[i] & missing))
        chosen.append(best)
        missing -= shown[best]
    return sorted(chosen)


def others_exhaustive(rows: Sequence[Any], kept: Iterable[int], ids: Sequence[str | None] | None = None) -> list[Any]:
    """Make parameters of tuples; those of other indices than ``kept`` are exhaustive."""
    kept, ids = set(kept), ids or [None] * len(rows)
    mark = pytest.mark.exhaustive
    return [pytest.param(*row, marks=[] if i in kept else mark, id=ids[i]) for i, row in enumerate(rows)]


def pairs(row: Sequence[Hashable]) -> Iterable[Hashable]:
    """List the pairs of values that a row of a product shows, each value with its place."""
    return combinations(enumerate(row), 2)


def each_pair(**values: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test with a product; without the mark ``exhaustive``, each pair of values is in one row."""
    rows = list(product(*values.values()))
    places = list(product(*(range(len(of)) for of in values.values())))
    return pytest.mark.parametrize(tuple(values), others_exhaustive(rows, covering(places, pairs)))


def in_turns(**values: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize with a product of two; those of the longer meet one of the other, or all in the exhaustive tests."""
    rows = list(product(*map(list, values.values())))
    places = product(*(range(len(of)) for of in values.values()))
    fewest = min(map(len, values.values()))
    return pytest.mark.parametrize(
        tuple(values), others_exhaustive(rows, [i for i, at in enumerate(places) if sum(at) % fewest == 0])
    )


def few(names: str | tuple[str, ...], rows: Sequence[Any], kept: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize with rows; those that are not among ``kept`` are exhaustive."""
    tuples = [row if isinstance(names, tuple) else (row,) for row in rows]
    return pytest.mark.parametrize(names, others_exhaustive(tuples, [i for i, r in enumerate(rows) if r in kept]))


def one_in(count: int, names: str | tuple[str, ...], rows: Sequence[Any], **more: Any) -> pytest.MarkDecorator:
    """Parametrize with rows of which all but one in ``count`` are exhaustive."""
    tuples = [row if isinstance(names, tuple) else (row,) for row in rows]
    return pytest.mark.parametrize(names, others_exhaustive(tuples, range(0, len(rows), count)), **more)
