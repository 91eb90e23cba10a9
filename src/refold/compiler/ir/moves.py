"""The moves of axes: what an operation does that computes nothing, told once for all who read graphs.

ATen spells them in some thirty ways. `read` gives each as an expression of nine moves, with axes that are not negative
and ranges that are closed: a ``select`` is a slice whose axis a view drops, a ``roll`` a cat of slices. A reader of
graphs says what each of the nine is for it, in `Rules` of its own. What a spelling means is in `_SPELLINGS` alone.

Shapes. Each move says how (...) becomes another (...); a `Moved` has the shape that results. Design decision 3.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch.fx import Node

from ..private import statically_known_true
from .builder import Builder
from .fx import CASTS, RESHAPES, Size, arg, is_tensor, known, same, value

aten = torch.ops.aten
prims = torch.ops.prims


class NotThis(Exception):
    """A reader has no word for a value; it takes it as it is."""


@dataclass(frozen=True)
class Moved:
    """A move of nodes or of other moves; ``shape`` is that of the result. Sizes may be symbols."""

    of: tuple[Any, ...]
    shape: tuple[Any, ...]

    @property
    def given(self) -> tuple[Any, ...]:
        """The shape of what is moved, the first of several."""
        return shape_of(self.of[0])

    def nodes(self) -> Iterator[Node]:
        """Iterate over the nodes that are moved."""
        for x in self.of:
            yield from x.nodes() if isinstance(x, Moved) else (x,)

    def chain(self) -> Iterator[Moved]:
        """Iterate over this and all moves below it."""
        yield self
        for x in self.of:
            yield from x.chain() if isinstance(x, Moved) else ()


class Copy(Moved):
    """The same elements along the same axes."""


class View(Moved):
    """The same elements in the same order, under the axes of the result."""


@dataclass(frozen=True)
class Permute(Moved):
    """Axis i of the result is axis ``order[i]``."""

    order: tuple[int, ...]


class Expand(Moved):
    """Repeated along axes of size one, and along new ones in front, to the shape of the result."""


@dataclass(frozen=True)
class Slice(Moved):
    """Positions ``start``, ``start + step``, ... below ``stop`` of an axis."""

    dim: int
    start: Any
    stop: Any
    step: int = 1


@dataclass(frozen=True)
class Pad(Moved):
    """A number before and after an axis."""

    dim: int
    before: Any
    after: Any
    value: float = 0


@dataclass(frozen=True)
class Cat(Moved):
    """Several, joined along an axis."""

    dim: int


@dataclass(frozen=True)
class Flip(Moved):
    """Some axes, turned round."""

    dims: tuple[int, ...]


@dataclass(frozen=True)
class Write(Slice):
    """The first, with the positions that a slice would read replaced by the second."""


# Decides a question on sizes that may be symbols.
Holds = Callable[[Any], bool]


def shape_of(x: Any) -> tuple[Any, ...]:
    """Return the shape of a node, or of what was moved."""
    return x.shape if isinstance(x, Moved) else tuple(map(known, value(x).shape))


def is_whole(part: Sequence[Size], whole: Sequence[Size]) -> bool:
    """Tell whether a part of a tensor has its shape for certain."""
    return len(part) == len(whole) and all(same(a, b) for a, b in zip(part, whole, strict=True))


def read(node: Any, holds: Holds = statically_known_true) -> Moved | None:
    """Read a node as moves of other nodes; None if it computes something, or it cannot be told what it takes.

    Args:
        node: A node.
        holds: Decides whether a position that is a symbol counts from the front.
    """
    spelling = _SPELLINGS.get(node.target)
    return spelling(node, holds) if spelling is not None and is_tensor(node) else None


Reader = TypeVar("Reader")
Answer = TypeVar("Answer")


class Rules(Generic[Reader, Answer]):
    """What one reader of graphs makes of each move."""

    def __init__(self) -> None:
        self.by_move: dict[type[Any], Callable[..., Answer]] = {}

    def on(self, *moves: type[Any]) -> Callable[[Callable[..., Answer]], Callable[..., Answer]]:
        """Register a rule: (reader, what is moved how, the reader's results for what is moved) -> result."""

        def register(rule: Callable[..., Answer]) -> Callable[..., Answer]:
            self.by_move.update(dict.fromkeys(moves, rule))
            return rule

        return register

    def apply(self, reader: Reader, x: Any, leaf: Callable[[Node], Any]) -> Answer:
        """Return a reader's result for a node or for moves of nodes.

        Args:
            reader: Handed to the rules.
            x: A node, or moves of nodes.
            leaf: Returns the reader's result for a node.

        Raises:
            NotThis: It has no rule for a move.
        """
        if not isinstance(x, Moved):
            return leaf(x)
        if type(x) not in self.by_move:
            raise NotThis
        return self.by_move[type(x)](reader, x, *(self.apply(reader, y, leaf) for y in x.of))


def emit(build: Builder, x: Moved, *given: Node, before: Sequence[Size] = ()) -> Node:
    """Insert a move of nodes, all of which may have the same axes ``before`` those that are moved."""
    lead, first = len(before), given[0]
    match x:
        case View():
            return build.reshape(first, [*before, *x.shape])
        case Permute():
            return build.permute(first, [*range(lead), *(lead + d for d in x.order)])
        case Expand():
            ones = [1] * (len(x.shape) - len(x.given))
            first = build.reshape(first, [*before, *ones, *value(first).shape[lead:]]) if before and ones else first
            return build.expand(first, [*before, *x.shape])
        case Write():
            return build.call(aten.slice_scatter.default, *given, lead + x.dim, x.start, x.stop, x.step)
        case Slice():
            return build.call(aten.slice.Tensor, first, lead + x.dim, x.start, x.stop, x.step)
        case Pad():
            pads = [*[0] * (2 * (len(x.shape) - 1 - x.dim)), x.before, x.after]
            return build.call(aten.constant_pad_nd.default, first, pads, x.value)
        case Cat():
            return build.call(aten.cat.default, list(given), lead + x.dim)
        case Flip():
            return build.call(prims.rev.default, first, [lead + d for d in x.dims]) if x.dims else first
    return build.call(aten.clone.default, first)


def insert(build: Builder, x: Any, leaf: Callable[[Node], Node], before: Sequence[Size] = ()) -> Node:
    """Insert all moves of nodes, each of which ``leaf`` replaces by what is to be moved in its place."""
    return (
        emit(build, x, *(insert(build, y, leaf, before) for y in x.of), before=before)
        if isinstance(x, Moved)
        else leaf(x)
    )


# What the spellings mean ---------------------------------------------------------------------


def _view(node: Node, holds: Holds) -> Moved:
    return View((arg(node, 0),), shape_of(node))


def _copy(node: Node, holds: Holds) -> Moved | None:
    source = arg(node, 1 if node.target is aten.copy.default else 0)
    if not is_tensor(source) or not is_whole(shape_of(source), shape_of(node)):
        return None
    kinds = [(value(x).dtype, value(x).device) for x in (source, node)]
    return Copy((source,), shape_of(node)) if kinds[0] == kinds[1] else None


def _permute(node: Node, holds: Holds) -> Moved:
    rank = value(node).dim()
    order = list(range(rank))
    if node.target is aten.permute.default:
        order = [d % rank for d in arg(node, 1)]
    elif rank > 1:
        i, j = (arg(node, 1), arg(node, 2)) if node.target is aten.transpose.int else (0, 1)
        order[i], order[j] = order[j], order[i]
    return Permute((arg(node, 0),), shape_of(node), tuple(order))


def _expand(node: Node, holds: Holds) -> Moved:
    return Expand((arg(node, 0),), shape_of(node))


def _repeat(node: Node, holds: Holds) -> Moved:
    """Tile every axis: an axis of copies is outside each, and merges with it."""
    times = [known(x.meta["val"]) if isinstance(x, Node) else x for x in arg(node, 1)]
    shape = (*[1] * (len(times) - value(arg(node, 0)).dim()), *shape_of(arg(node, 0)))
    apart = View((arg(node, 0),), tuple(n for size in shape for n in (1, size)))
    tiled = Expand((apart,), tuple(n for pair in zip(times, shape, strict=True) for n in pair))
    return View((tiled,), shape_of(node))


def _range(start: Any, size: Any, length: Any, step: int, holds: Holds) -> tuple[Any, Any, int] | None:
    """Return where a slice of some length begins and ends, counted from the front, and its step."""
    start = known(start.meta["val"]) if isinstance(start, Node) else start or 0
    if isinstance(start, int):
        start = start if start >= 0 else max(start + size, 0) if isinstance(size, int) else start + size
    elif not holds(start >= 0):
        if not holds(start < 0):
            return None
        start = start + size
    none = isinstance(length, int) and length == 0
    return (0, 0, step) if none else (start, start + (length if step == 1 else (length - 1) * step + 1), step)


def _slice(node: Node, holds: Holds) -> Moved | None:
    source, step = arg(node, 0), arg(node, 4, "step", 1)
    dim = arg(node, 1, "dim", 0) % value(node).dim()
    size, length = shape_of(source)[dim], shape_of(node)[dim]
    where = (0, size, 1) if same(size, length) else _range(arg(node, 2, "start"), size, length, step, holds)
    return None if where is None else Slice((source,), shape_of(node), dim, *where)


def _select(node: Node, holds: Holds) -> Moved | None:
    source = arg(node, 0)
    dim = arg(node, 1, "dim") % value(source).dim()
    where = _range(arg(node, 2, "index"), shape_of(source)[dim], 1, 1, holds)
    return None if where is None else _position(source, dim, where[0], shape_of(node))


def _position(source: Any, dim: int, at: Any, shape: tuple[Any, ...]) -> Moved:
    """Read one position of an axis, which goes."""
    return View((Slice((source,), (*shape[:dim], 1, *shape[dim:]), dim, at, at + 1),), shape)


def _item(node: Any, holds: Holds) -> Moved | None:
    """Read one of several parts of a tensor."""
    call, at = node.args
    if not isinstance(call, Node) or call.target not in SEVERAL:
        return None
    source, shape = arg(call, 0), shape_of(node)
    dim = arg(call, SEVERAL[call.target], "dim", 0) % value(source).dim()
    if call.target is aten.unbind.int:
        return _position(source, dim, at, shape)
    sizes = [known(x.shape[dim]) for x in call.meta["val"]]
    start = sum(sizes[:at])
    return Slice((source,), shape, dim, start, start + sizes[at])


def _pad(node: Node, holds: Holds) -> Moved | None:
    """Pad axis by axis; a negative number of positions is cut off."""
    found, pads, fill = arg(node, 0), list(arg(node, 1)), arg(node, 2, "value", 0) or 0
    if not all(isinstance(n, int) for n in pads) or isinstance(fill, Node):
        return None
    for i, (before, after) in enumerate(zip(pads[::2], pads[1::2], strict=True)):
        shape = list(shape_of(found))
        dim = len(shape) - 1 - i
        if before < 0 or after < 0:
            start, stop = max(-before, 0), shape[dim] - max(-after, 0)
            shape[dim], before, after = stop - start, max(before, 0), max(after, 0)
            found = Slice((found,), tuple(shape), dim, start, stop)
        if before or after:
            shape[dim] += before + after
            found = Pad((found,), tuple(shape), dim, before, after, fill)
    return found if isinstance(found, Moved) else Copy((found,), shape_of(node))


def _cat(node: Node, holds: Holds) -> Moved:
    parts, shape, dim = list(arg(node, 0)), shape_of(node), arg(node, 1, "dim", 0) % value(node).dim()
    if node.target is aten.stack.default:
        return Cat(tuple(View((x,), (*shape[:dim], 1, *shape[dim + 1 :])) for x in parts), shape, dim)
    return Cat(tuple(x for x in parts if value(x).dim() == len(shape)), shape, dim)  # an empty (0,) goes with all


def _flip(node: Node, holds: Holds) -> Moved:
    rank = max(value(node).dim(), 1)
    return Flip((arg(node, 0),), shape_of(node), tuple(d % rank for d in arg(node, 1)))


def _roll(node: Node, holds: Holds) -> Moved | None:
    """Exchange the two ends of each axis."""
    shifts, dims = ([x] if isinstance(x, int) else list(x) for x in (arg(node, 1), arg(node, 2, "dims", [])))
    shape = shape_of(node)
    found: Moved = Copy((arg(node, 0),), shape)
    if not dims or 0 in shape or not all(isinstance(n, int) for n in (*shape, *shifts)):
        return None
    for shift, d in zip(shifts, (d % len(shape) for d in dims), strict=True):
        if at := -shift % shape[d]:
            ends = [(a, b, (*shape[:d], b - a, *shape[d + 1 :])) for a, b in ((at, shape[d]), (0, at))]
            found = Cat(tuple(Slice((found,), own, d, a, b) for a, b, own in ends), shape, d)
    return found


def _write(node: Any, holds: Holds) -> Moved | None:
    whole, part = node.args[:2]
    shape, dim = shape_of(node), arg(node, 2, "dim", 0) % value(node).dim()
    if node.target is aten.select_scatter.default:
        where = _range(arg(node, 3, "index"), shape[dim], 1, 1, holds)
        part = View((part,), (*shape[:dim], 1, *shape[dim + 1 :]))
    else:
        where = _range(arg(node, 3, "start"), shape[dim], shape_of(part)[dim], arg(node, 5, "step", 1), holds)
    return None if where is None else Write((whole, part), shape, dim, *where)


# Operations with several results that are parts of a tensor, and where they name the axis.
SEVERAL: dict[Any, int] = {aten.unbind.int: 1, aten.split.Tensor: 2, aten.split_with_sizes.default: 2}
_COPIES = (*CASTS, aten.alias.default, aten.clone.default, aten.detach.default, aten.copy.default)
_VIEWS = (*RESHAPES, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
_SPELLINGS: dict[Any, Callable[[Node, Holds], Moved | None]] = {
    **dict.fromkeys(_COPIES, _copy),
    **dict.fromkeys(_VIEWS, _view),
    **dict.fromkeys((aten.permute.default, aten.transpose.int, aten.t.default), _permute),
    aten.expand.default: _expand,
    aten.repeat.default: _repeat,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    operator.getitem: _item,
    aten.constant_pad_nd.default: _pad,
    **dict.fromkeys((aten.cat.default, aten.stack.default), _cat),
    **dict.fromkeys((aten.flip.default, prims.rev.default), _flip),
    aten.roll.default: _roll,
    **dict.fromkeys((aten.slice_scatter.default, aten.select_scatter.default), _write),
}
