"""Recognise linear recurrences that are computed as parallel prefix networks, by algebra.

Such a network combines neighbours ``(a1, b1), (a2, b2) -> (a1 a2, a2 b1 + b2)`` in a tree, by doubling, or in any
other order (Blelloch 1990; Hillis & Steele 1986). Nothing is matched here. Each element of a value is a word about the
steps of the recurrence, and the network is run on these words:

- ``a[i] ... a[j]`` is a product;
- ``b[j] + a[j] b[j-1] + ... + a[j] ... a[i+1] b[i]`` is a state that started at step i;
- a product of the factors after a state, and that state, is a decayed state.

A product of neighbours is a product, a decayed state and the state after it are a longer state. A value whose element
t is the state from step 0 to step t is the recurrence, however it came about. What is none of these is an opaque value,
at which another network may begin.

Values are words along time alone: the other axes must go through the network as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..ir.fx import arg, is_tensor, known, value

aten = torch.ops.aten
prims = torch.ops.prims

# Shorter networks are ordinary layer code; longer ones take long to go through.
SHORTEST, LONGEST = 8, 1 << 16

_SAME = (
    aten.clone.default, aten.alias.default, aten.detach.default, aten.contiguous.default, aten.lift_fresh_copy.default,
)  # fmt: skip
_CASTS = (prims.convert_element_type.default, aten._to_copy.default)
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_FILLED = {
    aten.zeros.default: 0.0, aten.ones.default: 1.0, aten.zeros_like.default: 0.0, aten.ones_like.default: 1.0,
    aten.new_zeros.default: 0.0, aten.new_ones.default: 1.0,
}  # fmt: skip
_TIME = "time"
_ZERO, _ONE = 0, 1


class _Opaque(Exception):
    """A value is no word about a recurrence."""


@dataclass(frozen=True)
class Words:
    """A value of a network.

    Attributes:
        ids: The word of each element, as the number `Algebra` has for it; axes that are not time have size one.
        labels: For each axis ``time``, an axis of the operands counted from the last (-1), or None: the same all along.
    """

    ids: torch.Tensor
    labels: tuple[Any, ...]


@dataclass(frozen=True)
class Found:
    """A value that is a recurrence: ``h[t] = a[t] h[t-1] + b[t]`` from h = 0 along an axis; ``t + 1`` if ``reverse``.

    ``a`` is None for a factor of one, and the exponential of that node if ``exponent``.
    """

    node: Node
    a: Node | None
    exponent: bool
    b: Node
    dim: int
    reverse: bool


class Algebra:
    """Numbers for words, and what their products and sums are."""

    def __init__(self) -> None:
        self._words: list[tuple[Any, ...]] = [("0",), ("1",)]
        self._numbers: dict[tuple[Any, ...], int] = {word: i for i, word in enumerate(self._words)}

    def number(self, *word: Any) -> int:
        """Return the number of a word."""
        if word not in self._numbers:
            self._numbers[word] = len(self._words)
            self._words.append(word)
        return self._numbers[word]

    def leaf(self, source: Any, t: int) -> int:
        """Return an operand at a step."""
        return self.number("leaf", source, t)

    def _product(self, x: int) -> tuple[Any, int, int] | None:
        """Read a word as a product: (operand, first, last)."""
        word = self._words[x]
        if word[0] == "leaf":
            return word[1], word[2], word[2]
        return word[1:] if word[0] == "product" else None

    def state(self, x: int) -> tuple[Any, Any, int, int] | None:
        """Read a word as a state: (factors or None, inputs, first, last); any factors, ``...``, if it is one input."""
        word = self._words[x]
        if word[0] == "leaf":
            return ..., word[1], word[2], word[2]
        return word[1:] if word[0] == "state" else None

    def _decayed(self, x: int) -> tuple[Any, Any, int, int, int] | None:
        """Read a word as a decayed state: (factors, inputs, first, last, step to which it decayed)."""
        word = self._words[x]
        if word[0] == "decayed":
            return word[1:]
        if word[0] == "state" and word[1] is None:
            return None, word[2], word[3], word[4], word[4]
        return None

    def times(self, x: int, y: int) -> int:
        """Return a product of words."""
        if _ZERO in (x, y):
            return _ZERO
        if _ONE in (x, y):
            return y if x == _ONE else x
        p, q = self._product(x), self._product(y)
        if p is not None and q is not None and p[0] == q[0]:
            (source, i, j), (_, k, m) = sorted((p, q), key=lambda part: part[1])
            if j + 1 != k:
                raise _Opaque
            return self.number("product", source, i, m)
        for factor, other in ((p, y), (q, x)):
            if factor is None:
                continue
            source, first, last = factor
            state, decayed = self.state(other), self._decayed(other)
            if state is not None and state[0] in (..., source) and state[3] + 1 == first and source != state[1]:
                return self.number("decayed", source, *state[1:], last)
            if decayed is not None and decayed[0] == source and decayed[4] + 1 == first:
                return self.number("decayed", *decayed[:4], last)
        raise _Opaque

    def plus(self, x: int, y: int) -> int:
        """Return a sum of words."""
        if _ZERO in (x, y):
            return y if x == _ZERO else x
        for earlier, later in ((x, y), (y, x)):
            decayed, state, other = self._decayed(earlier), self.state(later), self._decayed(later)
            if decayed is None and (alone := self.state(earlier)) is not None and alone[0] is ...:
                decayed = None, alone[1], alone[2], alone[3], alone[3]  # a sum without factors begins
            if decayed is None:
                continue
            a, b, first, last, to = decayed
            follows = state is not None and state[0] in (..., a) and state[1:3] == (b, last + 1)
            if state is not None and follows and (a is None or to == state[3]):
                return self.number("state", a, b, first, state[3])
            if other is not None and a is not None and other[:3] == (a, b, last + 1) and other[4] == to:
                return self.number("decayed", a, b, first, other[3], to)
        raise _Opaque

    def exp(self, x: int) -> int:
        """Return the exponential of a word: that of a sum is a product."""
        if x == _ZERO:
            return _ONE
        state = self.state(x)
        if state is None or state[0] not in (None, ...):
            raise _Opaque
        source = ("exp", state[1])
        return self.leaf(source, state[2]) if state[2] == state[3] else self.number("product", source, *state[2:])


class _Reader:
    """Runs the nodes of a graph on words."""

    def __init__(self, reverse: bool) -> None:
        self.reverse = reverse
        self.algebra = Algebra()
        self.words: dict[Node, Words] = {}

    def read(self, node: Any) -> Found | None:
        """Find out what a node is, and tell if it is a whole recurrence."""
        try:
            words = self._words(node)
        except (_Opaque, IndexError, RuntimeError, ValueError):
            return None
        if tuple(words.ids.shape) != tuple(
            size if label == _TIME else 1 for size, label in zip(value(node).shape, words.labels, strict=True)
        ):
            return None
        self.words[node] = words
        return self._whole(node, words)

    def _whole(self, node: Node, words: Words) -> Found | None:
        times = [dim for dim, label in enumerate(words.labels) if label == _TIME]
        if len(times) != 1 or words.ids.numel() < SHORTEST:
            return None
        ids = words.ids.flatten().tolist()
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
            raise _Opaque
        target, args = node.target, node.args
        if not (value(node).is_floating_point() or value(node).is_complex()):
            raise _Opaque
        if target in _FILLED:
            return self._constant(node, _FILLED[target])
        if target in (aten.full.default, aten.full_like.default, aten.scalar_tensor.default):
            return self._constant(node, args[0 if target is aten.scalar_tensor.default else 1])
        if target in _SAME or target in _CASTS:
            return self.words[args[0]] if args[0] in self.words else _opaque()
        if target is aten.copy.default and value(args[0]).shape == value(args[1]).shape:
            return self.words[args[1]] if args[1] in self.words else _opaque()
        if target is aten.mul.Tensor:
            return self._pair(self.algebra.times, *args)
        if target is aten.add.Tensor and not node.kwargs:
            return self._pair(self.algebra.plus, *args)
        if target is aten.addcmul.default and not node.kwargs:
            product = self._pair(self.algebra.times, args[1], args[2], like=node)
            return self._pair(self.algebra.plus, args[0], product, like=node)
        if target is aten.exp.default and args[0] in self.words:
            words = self.words[args[0]]
            return Words(_each(self.algebra.exp, words.ids), words.labels)
        rule = _RULES.get(target)
        return rule(self, node) if rule is not None else _opaque()

    def _constant(self, node: Any, x: Any) -> Words:
        if isinstance(x, bool) or x not in (0, 1):
            raise _Opaque
        rank = value(node).dim()
        return Words(torch.full([1] * rank, _ONE if x else _ZERO), (None,) * rank)

    def begin(self, node: Any, dim: int) -> Words:
        """Let an opaque value be an operand with its steps along an axis."""
        size = known(value(node).shape[dim])
        if not isinstance(size, int) or not SHORTEST <= size <= LONGEST:
            raise _Opaque
        rank = value(node).dim()
        order = range(size - 1, -1, -1) if self.reverse else range(size)
        ids = torch.tensor([self.algebra.leaf((node, dim), t) for t in order])
        labels = tuple(_TIME if d == dim else d - rank for d in range(rank))
        return Words(ids.view([size if d == dim else 1 for d in range(rank)]), labels)

    def along(self, node: Any, dim: int) -> Words:
        """Return the words of a node of which positions of an axis are taken or filled."""
        words = self.words.get(node)
        if words is None:
            return self.begin(node, dim)
        return words

    def whole(self, words: Words, dim: int, size: int) -> torch.Tensor:
        """Return words with all positions of an axis written out, if it can be the time axis."""
        if words.labels[dim] == _TIME:
            return words.ids
        if words.labels[dim] is not None:
            raise _Opaque
        return words.ids.expand([size if d == dim else n for d, n in enumerate(words.ids.shape)])

    def _pair(self, combine: Callable[[int, int], int], x: Any, y: Any, like: Any = None) -> Words:
        sides = [x, y]
        nodes = [side for side in sides if isinstance(side, Node)]
        given = [self.words.get(side) if isinstance(side, Node) else side for side in sides]
        if not any(isinstance(side, Words) for side in given) or len(nodes) + (like is not None) < 1:
            raise _Opaque
        for i, side in enumerate(sides):
            if isinstance(given[i], Words):
                continue
            other: Any = given[1 - i]
            if not isinstance(side, Node):
                if isinstance(side, bool) or side not in (0, 1):
                    raise _Opaque
                rank = len(other.labels)
                given[i] = Words(torch.full([1] * rank, int(side)), (None,) * rank)
                continue
            times = [d - len(other.labels) for d, label in enumerate(other.labels) if label == _TIME]
            if len(times) != 1 or value(side).dim() < -times[0]:
                raise _Opaque
            given[i] = self.begin(side, value(side).dim() + times[0])
        a, b = (self._padded(words, max(len(words.labels) for words in given)) for words in given)  # type: ignore[arg-type, union-attr]
        labels = []
        for p, q in zip(a.labels, b.labels, strict=True):
            if p != q and None not in (p, q):
                raise _Opaque
            labels.append(q if p is None else p)
        left, right = torch.broadcast_tensors(a.ids, b.ids)
        seen: dict[tuple[int, int], int] = {}
        out = []
        for pair in zip(left.flatten().tolist(), right.flatten().tolist(), strict=True):
            if pair not in seen:
                seen[pair] = combine(*pair)
            out.append(seen[pair])
        return Words(torch.tensor(out, dtype=torch.int64).view(left.shape), tuple(labels))

    def _padded(self, words: Words, rank: int) -> Words:
        missing = rank - len(words.labels)
        return Words(words.ids.view([1] * missing + list(words.ids.shape)), (None,) * missing + words.labels)


def _opaque() -> Words:
    raise _Opaque


def _each(fn: Callable[[int], int], ids: torch.Tensor) -> torch.Tensor:
    return torch.tensor([fn(x) for x in ids.flatten().tolist()], dtype=torch.int64).view(ids.shape)


def _dim(node: Any, at: int, source: Any) -> int:
    given = node.args[at] if len(node.args) > at else node.kwargs.get("dim", 0)
    rank = value(source).dim()
    return given % rank if rank else 0


def _is_whole(node: Any, source: Any, dim: int) -> bool:
    return value(node).shape[dim] == value(source).shape[dim]


def _slice(reader: _Reader, node: Any) -> Words:
    source, dim = node.args[0], _dim(node, 1, node.args[0])
    if _is_whole(node, source, dim):
        return reader.words[source] if source in reader.words else _opaque()
    words = reader.along(source, dim)
    if words.labels[dim] is None:
        return words
    if words.labels[dim] != _TIME:
        raise _Opaque
    start, end, step = (arg(node, at) for at in (2, 3, 4))
    size = words.ids.shape[dim]
    ids = aten.slice.Tensor(words.ids, dim, start or 0, size if end is None else end, step or 1)
    return Words(ids, words.labels)


def _select(reader: _Reader, node: Any) -> Words:
    source, dim = node.args[0], _dim(node, 1, node.args[0])
    words = reader.words.get(source)
    if words is None:
        raise _Opaque  # a loop's own way to read a step; not a network's
    labels = words.labels[:dim] + words.labels[dim + 1 :]
    return Words(words.ids.select(dim, node.args[2] if words.labels[dim] == _TIME else 0), labels)


def _flip(reader: _Reader, node: Any) -> Words:
    words = reader.words.get(node.args[0])
    if words is None:
        raise _Opaque
    dims = [d % len(words.labels) for d in node.args[1]]
    if any(words.labels[d] not in (_TIME, None) for d in dims):
        raise _Opaque
    return Words(words.ids.flip(dims), words.labels)


def _joined(reader: _Reader, parts: Sequence[Any], dim: int, new_axis: bool) -> Words:
    found = [reader.words.get(part) for part in parts]
    if not any(found):
        raise _Opaque
    like = next(words for words in found if words is not None)
    pieces = []
    labels: list[Any] = [None] * len(like.labels)
    for part, words in zip(parts, found, strict=True):
        if words is None:
            words = reader.begin(part, dim if not new_axis else _time_of(like))
        for d, label in enumerate(words.labels):
            if label is None or (d == dim and not new_axis):
                continue
            if labels[d] not in (None, label):
                raise _Opaque
            labels[d] = label
        pieces.append(words)
    out = []
    for part, words in zip(parts, pieces, strict=True):
        ids = words.ids
        for d, label in enumerate(labels):
            if label == _TIME and (new_axis or d != dim):
                ids = ids.expand([value(part).shape[d] if i == d else n for i, n in enumerate(ids.shape)])
        out.append(ids if new_axis else reader.whole(Words(ids, words.labels), dim, value(part).shape[dim]))
    if new_axis:
        return Words(torch.stack(out, dim), (*labels[:dim], _TIME, *labels[dim:]))
    return Words(torch.cat(out, dim), tuple(_TIME if d == dim else label for d, label in enumerate(labels)))


def _time_of(words: Words) -> int:
    times = [d for d, label in enumerate(words.labels) if label == _TIME]
    if len(times) != 1:
        raise _Opaque
    return times[0]


def _cat(reader: _Reader, node: Any) -> Words:
    return _joined(reader, node.args[0], _dim(node, 1, node), False)


def _stack(reader: _Reader, node: Any) -> Words:
    return _joined(reader, node.args[0], _dim(node, 1, node), True)


def _pad(reader: _Reader, node: Any) -> Words:
    source, pads = node.args[:2]
    fill = node.args[2] if len(node.args) > 2 else 0
    rank = value(source).dim()
    moved = [rank - 1 - i // 2 for i, pad in enumerate(pads) if pad]
    if not moved or fill not in (0, 1) or len(set(moved)) != 1:
        raise _Opaque
    words = reader.along(source, moved[0])
    ids = reader.whole(words, moved[0], value(source).shape[moved[0]])
    labels = tuple(_TIME if d == moved[0] else label for d, label in enumerate(words.labels))
    return Words(aten.constant_pad_nd.default(ids, pads, int(fill)), labels)


def _scatter(reader: _Reader, node: Any) -> Words:
    base, source = node.args[:2]
    dim = _dim(node, 2, base)
    words = reader.along(base, dim)
    if source not in reader.words:
        raise _Opaque
    own = reader.words[source]
    ids = reader.whole(words, dim, value(base).shape[dim]).clone()
    single = node.target is aten.select_scatter.default
    labels = (*own.labels[:dim], _TIME, *own.labels[dim + (not single) :])
    if any(p != q and None not in (p, q) for p, q in zip(labels, words.labels, strict=True)):
        raise _Opaque
    if ids.shape != tuple(n if label == _TIME else 1 for n, label in zip(value(base).shape, labels, strict=True)):
        raise _Opaque
    if not single:
        own_ids = reader.whole(own, dim, value(source).shape[dim])
        return Words(aten.slice_scatter.default(ids, own_ids, dim, *node.args[3:]), labels)
    return Words(aten.select_scatter.default(ids, own.ids, dim, *node.args[3:]), labels)


def _view(reader: _Reader, node: Any) -> Words:
    given, wanted = [int(n) for n in value(node.args[0]).shape], [int(n) for n in value(node).shape]
    words = reader.words.get(node.args[0])
    if words is None:
        words = reader.begin(node.args[0], _split_axis(given, wanted))
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
        if own == [label for n, label in zip(given[i:p], words.labels[i:p], strict=True) if n != 1 and label == _TIME]:
            sizes += wanted[j:q]
            labels += [_TIME if own and n != 1 else None for n in wanted[j:q]]
        elif len(own) == 1 and sum(n != 1 for n in wanted[j:q]) == 1:
            sizes += [1] * (q - j)
            labels += [own[0] if n != 1 else None for n in wanted[j:q]]
        elif all(label is None for label in own):
            sizes += [1] * (q - j)
            labels += [None] * (q - j)
        else:
            raise _Opaque
        i, j = p, q
    return Words(words.ids.reshape(sizes), tuple(labels))


def _split_axis(given: list[int], wanted: list[int]) -> int:
    """Return which axis a view splits in two."""
    at = next((i for i, (a, b) in enumerate(zip(given, wanted, strict=False)) if a != b), -1)
    if at < 0 or len(wanted) != len(given) + 1 or wanted[at + 2 :] != given[at + 1 :]:
        raise _Opaque
    return at


def _permute(reader: _Reader, node: Any) -> Words:
    words = reader.words.get(node.args[0])
    if words is None:
        raise _Opaque
    rank = len(words.labels)
    if node.target is aten.permute.default:
        order = [d % rank for d in node.args[1]]
    else:
        order = list(range(rank))
        i, j = node.args[1:3]
        order[i], order[j] = order[j], order[i]
    return Words(words.ids.permute(order), tuple(words.labels[d] for d in order))


def _unsqueeze(reader: _Reader, node: Any) -> Words:
    words = reader.words.get(node.args[0])
    if words is None:
        raise _Opaque
    dim = node.args[1] % (len(words.labels) + 1)
    return Words(words.ids.unsqueeze(dim), (*words.labels[:dim], None, *words.labels[dim:]))


def _squeeze(reader: _Reader, node: Any) -> Words:
    words = reader.words.get(node.args[0])
    if words is None:
        raise _Opaque
    shape, rank = value(node.args[0]).shape, len(words.labels)
    given = node.args[1] if len(node.args) > 1 else range(rank)
    dims = {d % rank for d in ([given] if isinstance(given, int) else given) if shape[d] == 1}
    keep = [d for d in range(rank) if d not in dims]
    return Words(words.ids.reshape([words.ids.shape[d] for d in keep]), tuple(words.labels[d] for d in keep))


_RULES: dict[Any, Callable[[_Reader, Any], Words]] = {
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.flip.default: _flip,
    prims.rev.default: _flip,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.constant_pad_nd.default: _pad,
    aten.slice_scatter.default: _scatter,
    aten.select_scatter.default: _scatter,
    **dict.fromkeys(_VIEWS, _view),
    aten.permute.default: _permute,
    aten.transpose.int: _permute,
    aten.unsqueeze.default: _unsqueeze,
    **dict.fromkeys((aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default), _squeeze),
}


def recurrences(nodes: Sequence[Node]) -> list[Found]:
    """Return the nodes that are whole recurrences, forwards or backwards in time."""
    found = []
    for reverse in (False, True):
        reader = _Reader(reverse)
        found += [one for node in nodes if (one := reader.read(node)) is not None]
    return found
