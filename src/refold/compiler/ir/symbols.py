"""The symbols of index notation: one per axis, split and unified as a graph reshapes and multiplies.

Symbols stand for axes of any shape: one symbol per axis, or several if the axis was merged from several. They are
unified only where the graph itself multiplies two axes element by element.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from itertools import zip_longest

from .fx import Size, same


class Axis:
    """A symbol with a size. Unification and splitting redirect it to the symbols that replace it."""

    __slots__ = ("_replacement", "size")

    def __init__(self, size: Size) -> None:
        self.size = size
        self._replacement: tuple[Axis, ...] | None = None

    def resolve(self) -> tuple[Axis, ...]:
        """Return the atomic symbols that this one stands for now."""
        if self._replacement is None:
            return (self,)
        return tuple(part for axis in self._replacement for part in axis.resolve())

    def redirect(self, *replacement: Axis) -> None:
        """Let this atomic symbol stand for others from now on."""
        self._replacement = replacement


Label = tuple[Axis, ...]


def resolve(label: Iterable[Axis]) -> Label:
    """Expand a label into atomic symbols."""
    return tuple(part for axis in label for part in axis.resolve())


def atoms(labels: Iterable[Label]) -> Label:
    """Return the atomic symbols of several labels, in order."""
    return resolve(axis for label in labels for axis in label)


def extent(label: Iterable[Axis]) -> int:
    """Return how many positions a label names."""
    return math.prod(int(axis.size) for axis in resolve(label))


def unify(a: Label, b: Label) -> bool:
    """Make two labels of equal total size name the same positions; split symbols where needed.

    Returns False, leaving only harmless splits, when the sizes do not nest, as in 6 = 2*3
    against 6 = 3*2.
    """
    left, right = list(resolve(a)), list(resolve(b))
    while left and right:
        x, y = left.pop(0), right.pop(0)
        if x is y:
            continue
        if same(x.size, y.size):
            x.redirect(y)
        elif (inner := _quotient(x.size, y.size)) is not None:
            x.redirect(y, rest := Axis(inner))
            left.insert(0, rest)
        elif (inner := _quotient(y.size, x.size)) is not None:
            y.redirect(x, rest := Axis(inner))
            right.insert(0, rest)
        else:
            return False
    return not left and not right


def broadcast(a: Sequence[Label], b: Sequence[Label]) -> tuple[Label, ...] | None:
    """Return the labels of what two values broadcast to, the last axes of which correspond; None if they do not fit."""
    pairs = [*zip_longest(reversed(a), reversed(b), fillvalue=())][::-1]
    return tuple(x or y for x, y in pairs) if all(unify(x, y) for x, y in pairs if x and y) else None


def _quotient(size: Size, outer: Size) -> int | None:
    if isinstance(size, int) and isinstance(outer, int) and outer > 1 and size % outer == 0:
        return size // outer
    return None


def regroup(labels: Sequence[Label], shape: Sequence[Size]) -> tuple[Label, ...] | None:
    """Redistribute symbols over a new shape, as a row-major reshape does; None if they do not fit."""
    flat = list(atoms(labels))
    if any(not isinstance(size, int) for size in (*shape, *(axis.size for axis in flat))):
        return _regroup_symbolic(flat, list(shape))
    grouped: list[Label] = []
    for size in shape:
        label: list[Axis] = []
        remaining = size
        while remaining != 1:
            if not flat:
                return None
            axis = flat.pop(0)
            if (rest := _quotient(remaining, axis.size)) is not None:
                label.append(axis)
                remaining = rest
            elif (inner := _quotient(axis.size, remaining)) is not None:
                outer, tail = Axis(remaining), Axis(inner)
                axis.redirect(outer, tail)
                label.append(outer)
                flat.insert(0, tail)
                remaining = 1
            else:
                return None
        grouped.append(tuple(label))
    return tuple(grouped) if not flat else None


def _regroup_symbolic(flat: list[Axis], shape: list[Size]) -> tuple[Label, ...] | None:
    """Regroup when sizes are symbols: strip what certainly corresponds, then one split or merge is left.

    A view keeps the number of elements, so when both ends agree, the middles have equal products
    even if no algebra on the symbols shows it.
    """
    ones = [same(size, 1) for size in shape]
    kept = [size for size, one in zip(shape, ones, strict=True) if not one]
    head: list[Label] = []
    while flat and kept and same(flat[0].size, kept[0]):
        head.append((flat.pop(0),))
        kept.pop(0)
    end: list[Label] = []
    while flat and kept and same(flat[-1].size, kept[-1]):
        end.insert(0, (flat.pop(),))
        kept.pop()
    old, new = _trailing_numbers([axis.size for axis in flat]), _trailing_numbers(kept)
    if math.prod(old) == math.prod(new):
        numbers = regroup([tuple(flat[len(flat) - len(old) :])], new)
        if numbers is None:
            return None
        end = [*numbers, *end]
        flat, kept = flat[: len(flat) - len(old)], kept[: len(kept) - len(new)]
    if len(flat) == 1 and kept:
        parts = [Axis(size) for size in kept]
        flat[0].redirect(*parts)
        middle: list[Label] = [(part,) for part in parts]
    elif len(kept) == 1 and flat:
        middle = [tuple(flat)]
    elif not flat and not kept:
        middle = []
    else:
        return None
    merged = iter([*head, *middle, *end])
    return tuple(() if one else next(merged) for one in ones)


def _trailing_numbers(sizes: Sequence[Size]) -> list[int]:
    """Return the longest suffix that holds no symbol."""
    suffix = list(itertools.takewhile(lambda size: isinstance(size, int), reversed(sizes)))
    return suffix[::-1]  # type: ignore[return-value]
