"""Find a region in another graph: the same steps in normal form, whatever letters, names, sizes and views they have.

A step matches a step if both do the same with the same numbers. Also, there must be a one-to-one renaming of letters
with which all that they read and the result agree. The axes of a value that a step makes may be in another order.
Factors of a contraction and both sides of a sum may be exchanged, so each order is tried. A rule's inputs stand for any
value whose axes are in their order. Design decision 24.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch.fx import Node

from .operations import COMMUTATIVE, OPERATORS
from .program import Equation, Equations, Groups, Letters, Read
from .read import Reading

# More factors than this are not tried in other orders.
_MOST_ORDERED = 5
# What these do depends on the order of axes.
_IN_ORDER = ("reshape",)
# A value of ours, one of theirs, and where each axis of ours is among those of theirs.
_Pair = tuple[str, str, tuple[int, ...]]
_Bound = dict[str, tuple[str, tuple[int, ...]]]
_Sizes = dict[str, int]


@dataclass(frozen=True)
class Match:
    """A region that was found: the nodes that stand for its inputs, and the sizes that its letters have there."""

    inputs: dict[str, Node]
    sizes: dict[str, int]


def match(pattern: Equations, reading: Reading, root: Node) -> Match | None:
    """Find a program's steps in a graph.

    Args:
        pattern: The region to look for.
        reading: The graph.
        root: The node that must hold the pattern's result.

    Returns:
        What stands for its inputs and letters; None if the steps are not there.
    """
    name = reading.names.get(root)
    if name is None:
        return None
    found = reading.program.defined()
    theirs = {**{step.name: step.letters for step in reading.program.steps}, **_flat(reading.program.inputs)}
    ours = pattern.defined()
    if name not in found:
        return None
    matching = _Matching(pattern, ours, found, theirs, reading.program.sizes)
    if len(ours[pattern.result.name].letters) != len(found[name].letters):
        return None
    start = (pattern.result.name, name, tuple(range(len(found[name].letters))))
    done = matching.find([start], {}, {})
    if done is None:
        return None
    bound, sizes = done
    nodes = {own: reading.nodes.get(other) for own, (other, _) in bound.items() if own in pattern.inputs}
    inputs = {own: node for own, node in nodes.items() if isinstance(node, Node)}
    whole = len(inputs) == len(pattern.inputs) and sizes.keys() == pattern.sizes.keys()
    return Match(inputs, sizes) if whole else None


def _flat(inputs: Mapping[str, Groups]) -> dict[str, Letters]:
    return {name: tuple(x for group in groups for x in group) for name, groups in inputs.items()}


class _Matching:
    def __init__(
        self, pattern: Equations, ours: Mapping[str, Equation], found: Mapping[str, Equation],
        theirs: Mapping[str, Letters], sizes: Mapping[str, int],
    ) -> None:  # fmt: skip
        self.pattern, self.ours, self.found, self.theirs, self.their_sizes = pattern, ours, found, theirs, sizes
        self.inputs = _flat(pattern.inputs)

    def find(self, pairs: list[_Pair], bound: _Bound, sizes: _Sizes) -> tuple[_Bound, _Sizes] | None:
        """Match pairs of values, ours and theirs, given what was matched before, and the sizes of our letters there."""
        if not pairs:
            return bound, sizes
        (own, other, order), *rest = pairs
        if own in bound:
            return self.find(rest, bound, sizes) if bound[own] == (other, order) else None
        bound = {**bound, own: (other, order)}
        if own in self.inputs:
            letters = self.theirs[other]
            if len(self.inputs[own]) != len(letters):
                return None
            known = dict(zip(self.inputs[own], (letters[at] for at in order), strict=True))
            added = self._sized(sizes, known)
            return None if added is None else self.find(rest, bound, added)
        if other not in self.found:
            return None
        for known, below in self._readings(self.ours[own], self.found[other], order):
            added = self._sized(sizes, known)
            if added is not None and (done := self.find([*below, *rest], bound, added)) is not None:
                return done
        return None

    def _sized(self, sizes: _Sizes, known: Mapping[str, str]) -> _Sizes | None:
        """Add the sizes that letters have there.

        None if one has two: by chance, two axes of the pattern have had one size, and one letter.
        """
        there = {own: self.their_sizes[other] for own, other in known.items()}
        return sizes | there if all(sizes.get(own, size) == size for own, size in there.items()) else None

    def _readings(
        self, a: Equation, b: Equation, order: tuple[int, ...]
    ) -> Iterator[tuple[dict[str, str], list[_Pair]]]:
        """Yield how letters and what two steps read may correspond; nothing if the steps differ."""
        if a.do != b.do or len(a.of) != len(b.of) or len(a.letters) != len(b.letters):
            return
        if a.do in _IN_ORDER and list(order) != sorted(order):
            return
        letters = _joined({}, a.letters, tuple(b.letters[at] for at in order))
        if letters is None:
            return
        many = (a.do == "contract" or a.do in COMMUTATIVE) and len(a.of) <= _MOST_ORDERED
        for of in itertools.permutations(b.of) if many else [b.of]:
            for known, pairs in self._pairs(a, list(zip(a.of, of, strict=True)), letters):
                if _options(a, {}) == _options(b, {theirs: ours for ours, theirs in known.items()}):
                    yield known, pairs

    def _pairs(
        self, a: Equation, reads: list[tuple[Read | float | int, Read | float | int]], letters: dict[str, str]
    ) -> Iterator[tuple[dict[str, str], list[_Pair]]]:
        if not reads:
            yield letters, []
            return
        (x, y), *rest = reads
        if not isinstance(x, Read) or not isinstance(y, Read):
            if x == y:
                yield from self._pairs(a, rest, letters)
            return
        if len(x.axes) != len(y.axes):
            return
        places = tuple(range(len(x.axes)))
        fixed = x.name in self.inputs or a.do in _IN_ORDER or a.do in OPERATORS
        for order in [places] if fixed else itertools.permutations(places):
            known: dict[str, str] | None = letters
            for group, at in zip(x.axes, order, strict=True):
                known = _joined(known or {}, group, y.axes[at])
                if known is None:
                    break
            else:
                for found, pairs in self._pairs(a, rest, known or {}):
                    yield found, [(x.name, y.name, order), *pairs]


def _joined(letters: dict[str, str], ours: Letters, theirs: Letters) -> dict[str, str] | None:
    """Put letters for letters, one for one; None if that contradicts what was put before."""
    if len(ours) != len(theirs):
        return None
    letters = dict(letters)
    for own, other in zip(ours, theirs, strict=True):
        if letters.setdefault(own, other) != other:
            return None
    return letters if len(set(letters.values())) == len(letters) else None


def _options(step: Equation, letters: Mapping[str, str]) -> dict[str, str]:
    return {k: str(letters.get(v, v) if k == "along" else v) for k, v in step.options.items()}
