"""Which rows of a product `make test` runs: each value, and each pair of values, once. `make test-all` runs all."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations, product
from typing import Any
from zlib import crc32

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


def few(names: str | tuple[str, ...], rows: Sequence[Any], kept: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize with rows; those that are not among ``kept`` are exhaustive."""
    tuples = [row if isinstance(names, tuple) else (row,) for row in rows]
    return pytest.mark.parametrize(names, others_exhaustive(tuples, [i for i, r in enumerate(rows) if r in kept]))


def _places(rows: Sequence[pytest.Item]) -> list[int]:
    """Number the rows of a test; in a product, by the sum of the numbers of the values, which so take turns."""
    given = [mark.args[0] for mark in rows[0].iter_markers("parametrize")]
    names = [[name.strip() for name in one.split(",")] if isinstance(one, str) else one for one in given]
    names += [[name] for name in rows[0].callspec.params if not any(name in own for own in names)]  # of fixtures
    places = [0] * len(rows)
    for own in names:
        seen: dict[str, int] = {}
        for i, row in enumerate(rows):
            places[i] += seen.setdefault(repr([row.callspec.params[name] for name in own]), len(seen))
    return places


def thin(items: Sequence[pytest.Item]) -> None:
    """Leave tests with the mark ``rows(count)`` one row in ``count``; the others are exhaustive.

    Which row is the first depends on the name of the test, so that a model that is a row of many tests runs in some.
    The mark of a test goes before that of its file. A test that says itself which rows are exhaustive is left alone.
    """
    tests = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and (mark := item.get_closest_marker("rows")):
            tests[item.nodeid.partition("[")[0], mark.args[0]].append(item)
    for (name, count), rows in tests.items():
        if any(item.get_closest_marker("exhaustive") for item in rows):
            continue
        first = crc32(name.encode())
        kept = [item for item, at in zip(rows, _places(rows), strict=True) if (at + first) % count == 0] or rows[:1]
        for item in rows:
            if item not in kept:
                item.add_marker("exhaustive")
