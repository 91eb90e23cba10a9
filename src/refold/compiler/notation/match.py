"""Find a region in another graph: the same steps in normal form, whatever letters, names, sizes and views they have.

A step matches a step if both do the same with the same numbers, and if their letters stand in the same places: each
reading is spelled by the positions at which letters first appear. What may be exchanged (the factors of a contraction,
both sides of a sum) is tried in each order. A rule's inputs stand for any value.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch.fx import Node

from .operations import COMMUTATIVE, OPERATORS
from .program import Groups, Letters, Program, Read, Step
from .read import Reading

# More factors than this are not tried in other orders.
_MOST_ORDERED = 5


@dataclass(frozen=True)
class Found:
    """A region that was found: the nodes that stand for its inputs, and the sizes that its letters have there."""

    inputs: dict[str, Node]
    sizes: dict[str, int]


def match(pattern: Program, reading: Reading, root: Node) -> Found | None:
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
    matching = _Matching(pattern, ours, found, theirs)
    bound = matching.find([(pattern.result.name, name)], {})
    if bound is None:
        return None
    nodes = {own: reading.nodes.get(other) for own, other in bound.items() if own in pattern.inputs}
    inputs = {own: node for own, node in nodes.items() if isinstance(node, Node)}
    sizes: dict[str, int] = {}
    for own, other in bound.items():
        letters = ours[own].letters if own in ours else matching.inputs[own]
        for letter, twin in zip(letters, theirs[other], strict=True):
            # By chance two axes of the pattern have had one size, and one letter.
            if sizes.setdefault(letter, reading.program.sizes[twin]) != reading.program.sizes[twin]:
                return None
    whole = len(inputs) == len(pattern.inputs) and sizes.keys() == pattern.sizes.keys()
    return Found(inputs, sizes) if whole else None


def _flat(inputs: Mapping[str, Groups]) -> dict[str, Letters]:
    return {name: tuple(x for group in groups for x in group) for name, groups in inputs.items()}


class _Matching:
    def __init__(
        self, pattern: Program, ours: Mapping[str, Step], found: Mapping[str, Step], theirs: Mapping[str, Letters]
    ) -> None:
        self.pattern, self.ours, self.found, self.theirs = pattern, ours, found, theirs
        self.inputs = _flat(pattern.inputs)

    def find(self, pairs: list[tuple[str, str]], bound: dict[str, str]) -> dict[str, str] | None:
        """Match pairs of values, ours and theirs, given what was matched before."""
        if not pairs:
            return bound
        (own, other), *rest = pairs
        if own in bound:
            return self.find(rest, bound) if bound[own] == other else None
        bound = {**bound, own: other}
        if own in self.inputs:
            fits = len(self.inputs[own]) == len(self.theirs[other])
            return self.find(rest, bound) if fits else None
        if other not in self.found:
            return None
        a, b = self.ours[own], self.found[other]
        for order in _orders(a, b):
            below = [(x.name, y.name) for x, y in order if isinstance(x, Read) and isinstance(y, Read)]
            if (done := self.find([*below, *rest], bound)) is not None:
                return done
        return None


def _orders(a: Step, b: Step) -> Iterator[list[tuple[Read | float | int, Read | float | int]]]:
    """Yield how the readings of two steps may correspond; nothing if the steps differ."""
    if a.do != b.do or len(a.of) != len(b.of) or len(a.letters) != len(b.letters):
        return
    many = (a.do == "contract" or a.do in COMMUTATIVE) and len(a.of) <= _MOST_ORDERED
    # The order of the axes of a value is of no meaning, but what reads it counts on it.
    wanted = _spelled(a, a.of)
    for order in itertools.permutations(b.of) if many else [b.of]:
        if _spelled(b, order) == wanted:
            yield list(zip(a.of, order, strict=True))


def _spelled(step: Step, of: tuple[Read | float | int, ...]) -> object:
    """Return a step with letters replaced by the order in which they appear."""
    places: dict[str, int] = {}

    def place(letter: str) -> int:
        return places.setdefault(letter, len(places))

    reads = [tuple(tuple(map(place, g)) for g in x.axes) if isinstance(x, Read) else float(x) for x in of]
    result = tuple(map(place, step.letters))
    options = {k: places.get(v, v) if k == "along" else v for k, v in step.options.items()}
    if step.do in OPERATORS:
        options = {k: str(v) for k, v in options.items()}
    return reads, result, sorted(options.items(), key=lambda item: item[0])
