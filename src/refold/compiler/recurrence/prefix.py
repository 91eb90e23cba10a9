"""Recognise linear recurrences that are computed as parallel prefix networks, by algebra (design decision 12).

Such a network combines neighbours ``(a1, b1), (a2, b2) -> (a1 a2, a2 b1 + b2)`` in a tree, by doubling, or in any
other order (Blelloch 1990; Hillis & Steele 1986). Nothing is matched here. Each element of a value is a word about the
steps of the recurrence (`refold.compiler.recurrence.words`), and the network is run on these words. A value whose
element t is the state from step 0 to step t is the recurrence, however it came about. What is no word is an opaque
value, at which another network may begin.

Shapes. A value (..., t, ...) has words of the shape (1, ..., t, ..., 1): they differ along time alone. The other axes
must go through the network as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.fx import Node
from torch.fx.node import map_arg

from ..ir.fx import CONVERT, is_tensor, known, value
from ..ir.moves import Cat, Copy, Flip, Moved, NotThis, Pad, Permute, Rules, Slice, View, Write, read, shape_of
from ..ir.views import is_view
from .scanned import Found
from .words import ONE, ZERO, Algebra, Opaque

aten = torch.ops.aten

# Shorter networks are ordinary layer code; longer ones take long to go through.
SHORTEST, LONGEST = 8, 1 << 16
# A network of eight steps has this many levels; what is combined less often is none.
FEWEST_LEVELS = 3

_PARTS = (aten.slice.Tensor, aten.select.int, aten.constant_pad_nd.default)
_PRODUCTS = (aten.mul.Tensor, aten.addcmul.default)
_TIME = "time"

_Ids = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Blocks:
    """An axis that was joined from equal parts: their number, and the label that each of them has along it."""

    parts: int
    label: Any


@dataclass(frozen=True)
class Words:
    """A value of a network.

    Attributes:
        ids: The word of each element, as the number `Algebra` has for it; axes that are not time have size one.
        labels: For each axis ``time``, an axis of the operands counted from the last (-1), `Blocks` of that, or None:
            the same all along.
    """

    ids: _Ids
    labels: tuple[Any, ...]


def recurrences(nodes: Sequence[Node]) -> list[Found]:
    """Return the nodes that are whole recurrences, forwards or backwards in time."""
    if levels(nodes, lambda x: x.target in _PARTS, lambda x: x.target in _PRODUCTS) < FEWEST_LEVELS:
        return []
    found: dict[Node, Found] = {}
    for reverse in (False, True):
        reader = _Reader(reverse)
        found |= {node: one for node in nodes if (one := reader.read(node)) is not None}
    return list(found.values())


def levels(nodes: Sequence[Node], is_part: Callable[[Node], bool], is_product: Callable[[Node], bool]) -> int:
    """Return how often what is multiplied was part of what was multiplied before.

    Args:
        nodes: Nodes in order.
        is_part: Tells whether a node takes a part of a tensor, or pads it.
        is_product: Tells whether a node multiplies.
    """
    found: dict[Node, int] = {}
    in_part: dict[Node, bool] = {}
    for node in nodes:
        found[node] = max((found.get(x, 0) for x in node.all_input_nodes), default=0)
        in_part[node] = is_part(node) or any(in_part.get(x, False) for x in node.all_input_nodes)
        if is_product(node) and in_part[node]:
            found[node], in_part[node] = found[node] + 1, False
    return max(found.values(), default=0)


class _Reader:
    """Runs the nodes of a graph on words."""

    def __init__(self, reverse: bool) -> None:
        self.reverse = reverse
        self.algebra = Algebra()
        self.words: dict[Node, Words] = {}
        self._views: dict[str, Node] = {}
        self._first: dict[Node, Node] = {}

    def read(self, node: Any) -> Found | None:
        """Find out what a node is, and tell if it is a whole recurrence."""
        if is_view(node):  # equal views of one value are one operand
            view = str((node.target, map_arg((node.args, node.kwargs), lambda x: self._first.get(x, x))))
            self._first[node] = self._views.setdefault(view, node)
        try:
            words = self._words(node)
        except (Opaque, NotThis, IndexError, TypeError, ValueError):
            return None
        if words.ids.shape != _sizes(words.labels, value(node).shape):
            return None
        self.words[node] = words
        return self._whole(node, words)

    def _whole(self, node: Node, words: Words) -> Found | None:
        times = [dim for dim, label in enumerate(words.labels) if label == _TIME]
        if len(times) != 1 or words.ids.size < SHORTEST:
            return None
        ids = words.ids.ravel().tolist()
        ids = ids[::-1] if self.reverse else ids
        last = self.algebra.state(ids[-1])
        if last is None or last[0] is ... or last[2:] != (0, len(ids) - 1):
            return None
        a, b = last[:2]
        exponent = a is not None and a[0] == "exp"
        factors = a[1] if exponent else a
        if b[0] == "exp" or value(b[0]).shape[b[1]] != len(ids):
            return None
        wanted = [self.algebra.leaf(b, 0), *(self.algebra.number("state", a, b, 0, t) for t in range(1, len(ids)))]
        if ids != wanted:
            return None
        rank = value(node).dim()
        if any(rank - times[0] != value(x).dim() - dim for x, dim in (factors or b, b)):
            return None
        if any(label not in (None, dim - rank) for dim, label in enumerate(words.labels) if dim != times[0]):
            return None
        return Found(node, None if factors is None else factors[0], exponent, b[0], times[0], self.reverse)

    # Operations ------------------------------------------------------------------------------

    def _words(self, node: Any) -> Words:
        if node.op != "call_function" or not is_tensor(node):
            raise Opaque
        if not (value(node).is_floating_point() or value(node).is_complex()):
            raise Opaque
        target, args = node.target, node.args
        if target in (aten.full.default, aten.scalar_tensor.default):
            return _filled(args[0 if target is aten.scalar_tensor.default else 1], value(node).dim())
        if target is CONVERT:
            return self.of(args[0])
        if target is aten.mul.Tensor:
            return self.pair(self.algebra.times, *args)
        if target is aten.add.Tensor and not node.kwargs:
            return self.pair(self.algebra.plus, *args)
        if target is aten.addcmul.default and not node.kwargs:
            product = self.pair(self.algebra.times, args[1], args[2], like=node)
            return self.pair(self.algebra.plus, args[0], product, like=node)
        if target is aten.exp.default:
            words = self.of(args[0])
            ids = [self.algebra.exp(x) for x in words.ids.ravel().tolist()]
            return Words(np.array(ids, np.int64).reshape(words.ids.shape), words.labels)
        if target is aten.view.dtype:
            return _complex_sum(self, node)
        moved = read(node)
        if moved is None or (target is aten.select.int and args[0] not in self.words):
            raise Opaque  # of an opaque value, a select is a loop's own way to read a step, not a network's
        return WORDS.apply(self, moved, lambda x: self.words.get(x, x))

    def of(self, node: Any) -> Words:
        """Return the words of a node that has some."""
        if node not in self.words:
            raise Opaque
        return self.words[node]

    def begin(self, node: Any, dim: int) -> Words:
        """Let an opaque value be an operand with its steps along an axis."""
        size = known(value(node).shape[dim])
        if not isinstance(size, int) or not SHORTEST <= size <= LONGEST:
            raise Opaque
        rank, source = value(node).dim(), (self._first.get(node, node), dim)
        order = range(size - 1, -1, -1) if self.reverse else range(size)
        ids = np.array([self.algebra.leaf(source, t) for t in order])
        labels = tuple(_TIME if d == dim else d - rank for d in range(rank))
        return Words(ids.reshape([size if d == dim else 1 for d in range(rank)]), labels)

    def along(self, x: Words | Node, dim: int) -> Words:
        """Return the words of what positions of an axis are taken of or filled."""
        return self.begin(x, dim) if isinstance(x, Node) else x

    def whole(self, words: Words, dim: int, size: int) -> _Ids:
        """Return words with all positions of an axis written out, if it can be the time axis."""
        if words.labels[dim] == _TIME:
            return words.ids
        if words.labels[dim] is not None:
            raise Opaque
        return np.repeat(words.ids, size, dim)

    def pair(self, combine: Callable[[int, int], int], x: Any, y: Any, like: Any = None) -> Words:
        """Combine the words of two operands, element by element."""
        sides = [x, y]
        nodes = [side for side in sides if isinstance(side, Node)]
        given = [self.words.get(side) if isinstance(side, Node) else side for side in sides]
        if not any(isinstance(side, Words) for side in given) or len(nodes) + (like is not None) < 1:
            raise Opaque
        for i, side in enumerate(sides):
            if isinstance(given[i], Words):
                continue
            other: Any = given[1 - i]
            if not isinstance(side, Node):
                given[i] = _filled(side, len(other.labels))
                continue
            time = _time_of(other) - len(other.labels)
            if value(side).dim() < -time:
                raise Opaque
            given[i] = self.begin(side, value(side).dim() + time)
        both: list[Any] = given
        a, b = (_padded(words, max(len(words.labels) for words in both)) for words in both)
        labels = []
        for p, q in zip(a.labels, b.labels, strict=True):
            if p != q and None not in (p, q):
                raise Opaque
            labels.append(q if p is None else p)
        left, right = np.broadcast_arrays(a.ids, b.ids)
        seen: dict[tuple[int, int], int] = {}
        out = []
        for pair in zip(left.ravel().tolist(), right.ravel().tolist(), strict=True):
            if pair not in seen:
                seen[pair] = combine(*pair)
            out.append(seen[pair])
        return Words(np.array(out, np.int64).reshape(left.shape), tuple(labels))


def _sizes(labels: Sequence[Any], shape: Sequence[Any]) -> tuple[Any, ...]:
    """Return the shape that words have."""
    parts = (label.parts if isinstance(label, Blocks) else 1 for label in labels)
    return tuple(n if label == _TIME else size for size, label, n in zip(parts, labels, map(known, shape), strict=True))


def _filled(x: Any, rank: int) -> Words:
    """Return the words of a constant."""
    if isinstance(x, bool) or x not in (0, 1):
        raise Opaque
    return Words(np.full([1] * rank, ONE if x else ZERO), (None,) * rank)


def _padded(words: Words, rank: int) -> Words:
    missing = rank - len(words.labels)
    return Words(words.ids.reshape([1] * missing + list(words.ids.shape)), (None,) * missing + words.labels)


def _time_of(words: Words) -> int:
    times = [d for d, label in enumerate(words.labels) if label == _TIME]
    if len(times) != 1:
        raise Opaque
    return times[0]


# Moves: of words, or of a node that has none, which may be an operand along one of its axes.
WORDS: Rules[_Reader, Words] = Rules()


def _known(words: Words | Node) -> Words:
    if isinstance(words, Node):
        raise Opaque
    return words


@WORDS.on(Copy)
def _copy(_: _Reader, x: Moved, words: Words) -> Words:
    return _known(words)


@WORDS.on(Slice)
def _slice(reader: _Reader, x: Slice, words: Words | Node) -> Words:
    dim = x.dim
    if x.given[dim] == x.shape[dim]:
        return _known(words)
    words = reader.along(words, dim)
    if words.labels[dim] is None:
        return words
    if words.labels[dim] != _TIME:
        raise Opaque
    return Words(words.ids[_positions(x)], words.labels)


def _positions(x: Slice) -> tuple[slice, ...]:
    """Return an index that takes a part of one axis."""
    return (*[slice(None)] * x.dim, slice(x.start, x.stop, x.step))


@WORDS.on(Flip)
def _flip(_: _Reader, x: Flip, words: Words) -> Words:
    words = _known(words)
    if any(words.labels[d] not in (_TIME, None) for d in x.dims):
        raise Opaque
    return Words(np.flip(words.ids, x.dims), words.labels)


@WORDS.on(Permute)
def _permute(_: _Reader, x: Permute, words: Words) -> Words:
    words = _known(words)
    return Words(words.ids.transpose(x.order), tuple(words.labels[d] for d in x.order))


@WORDS.on(Cat)
def _cat(reader: _Reader, x: Cat, *found: Words | Node) -> Words:
    dim, shapes = x.dim, [shape_of(part) for part in x.of]
    if all(isinstance(words, Node) for words in found):
        raise Opaque
    like = next(words for words in found if isinstance(words, Words))
    # Inductor joins what is stacked along another axis than time, and splits that axis afterwards.
    beside = isinstance(like.labels[dim], int)
    begin = _time_of(like) if beside else dim
    pieces = [reader.along(words, begin) for words in found]
    # What is one element wide has the same word all along: joined, these are the steps of an axis of their own.
    single = all(shape[dim] == 1 for shape in shapes)
    pieces = [_alike_along(words, dim) if single else words for words in pieces]
    blocks = beside and not single
    labels: list[Any] = [None] * len(like.labels)
    for words in pieces:
        for d, label in enumerate(words.labels):
            if label is None or (d == dim and not blocks):
                continue
            if labels[d] not in (None, label):
                raise Opaque
            labels[d] = label
    out = []
    for shape, words in zip(shapes, pieces, strict=True):
        ids = words.ids
        for d, label in enumerate(labels):
            if d != dim and label == _TIME and words.labels[d] is None:
                ids = np.repeat(ids, shape[d], d)
        if not blocks:
            ids = reader.whole(Words(ids, words.labels), dim, shape[dim])
        elif words.labels[dim] != like.labels[dim] or shape[dim] != shapes[0][dim]:
            raise Opaque
        out.append(ids)
    labels[dim] = Blocks(len(out), like.labels[dim]) if blocks else _TIME
    return Words(np.concatenate(out, dim), tuple(labels))


def _alike_along(words: Words, dim: int) -> Words:
    """Return words without the label of an axis that is not time."""
    label = words.labels[dim]
    labels = (*words.labels[:dim], label if label == _TIME else None, *words.labels[dim + 1 :])
    return Words(words.ids, labels)


@WORDS.on(Pad)
def _pad(reader: _Reader, x: Pad, words: Words | Node) -> Words:
    dim, fill = x.dim, x.value
    if fill not in (0, 1):
        raise Opaque
    words = reader.along(words, dim)
    ids = reader.whole(words, dim, x.given[dim])
    added = [(x.before, x.after) if d == dim else (0, 0) for d in range(len(x.shape))]
    labels = tuple(_TIME if d == dim else label for d, label in enumerate(words.labels))
    return Words(np.pad(ids, added, constant_values=ONE if fill else ZERO), labels)


@WORDS.on(Write)
def _write(reader: _Reader, x: Write, base: Words | Node, part: Words) -> Words:
    dim, own = x.dim, _known(part)
    words = reader.along(base, dim)
    ids = reader.whole(words, dim, x.shape[dim]).copy()
    labels = tuple(_TIME if d == dim else label for d, label in enumerate(own.labels))
    if any(p != q and None not in (p, q) for p, q in zip(labels, words.labels, strict=True)):
        raise Opaque
    if ids.shape != _sizes(labels, x.shape):
        raise Opaque
    ids[_positions(x)] = reader.whole(own, dim, shape_of(x.of[1])[dim])
    return Words(ids, labels)


@WORDS.on(View)
def _view(reader: _Reader, x: Moved, words: Words | Node) -> Words:
    given, wanted = list(x.given), list(x.shape)
    if not all(isinstance(n, int) for n in given + wanted):
        raise Opaque
    if isinstance(words, Node):
        words = reader.begin(words, _split_axis(given, wanted))
    words, given = _unblocked(words, given)
    sizes: list[int] = []
    labels: list[Any] = []
    i = j = 0
    while i < len(given) or j < len(wanted):
        p, q, a, b = i + 1, j + 1, given[i] if i < len(given) else 1, wanted[j] if j < len(wanted) else 1
        p, q = min(p, len(given)), min(q, len(wanted))
        while a != b:
            if a < b:
                a, p = a * given[p], p + 1
            else:
                b, q = b * wanted[q], q + 1
        own = [label for n, label in zip(given[i:p], words.labels[i:p], strict=True) if n != 1]
        if all(label == _TIME for label in own):
            sizes += wanted[j:q]
            labels += [_TIME if own and n != 1 else None for n in wanted[j:q]]
        elif len(own) == 1 and sum(n != 1 for n in wanted[j:q]) == 1:
            sizes += [1] * (q - j)
            labels += [own[0] if n != 1 else None for n in wanted[j:q]]
        elif all(label is None for label in own):
            sizes += [1] * (q - j)
            labels += [None] * (q - j)
        else:
            raise Opaque
        i, j = p, q
    return Words(words.ids.reshape(sizes), tuple(labels))


def _unblocked(words: Words, sizes: Sequence[int]) -> tuple[Words, list[int]]:
    """Split axes that were joined from equal parts; return the new sizes of the value, too."""
    shape, labels, new = list[int](), list[Any](), list[int]()
    for n, own, label in zip(sizes, words.ids.shape, words.labels, strict=True):
        split = isinstance(label, Blocks)
        shape += [own, 1] if split else [own]
        labels += [_TIME, label.label] if split else [label]
        new += [own, n // own] if split else [n]
    return Words(words.ids.reshape(shape), tuple(labels)), new


def _complex_sum(reader: _Reader, node: Any) -> Words:
    """Read a sum of complex values, which Inductor adds as pairs of real numbers."""

    def source(x: Any, target: Any) -> Any:
        while isinstance(x, Node) and is_view(x):
            x = x.args[0]
        return x if isinstance(x, Node) and x.target is target else None

    total = source(node.args[0], aten.add.Tensor)
    if not value(node).is_complex() or total is None or total.kwargs:
        raise Opaque
    parts = [source(x, aten.view.dtype) for x in total.args]
    if any(x is None or value(x.args[0]).dtype != value(node).dtype for x in parts):
        raise Opaque
    if any(value(x.args[0]).shape != value(node).shape for x in parts):
        raise Opaque
    return reader.pair(reader.algebra.plus, *(x.args[0] for x in parts))


def _split_axis(given: list[int], wanted: list[int]) -> int:
    """Return which axis a view splits in two."""
    at = next((i for i, (a, b) in enumerate(zip(given, wanted, strict=False)) if a != b), -1)
    if at < 0 or len(wanted) != len(given) + 1 or wanted[at + 2 :] != given[at + 1 :]:
        raise Opaque
    return at
