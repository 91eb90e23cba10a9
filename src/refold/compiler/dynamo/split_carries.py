"""Carries of a few elements that a step moves or mixes become one carry per element (design decision 10).

A step may roll a window (``torch.cat([w[:, 1:], x], 1)``, ``torch.roll``), rotate pairs of numbers, or multiply a short
vector by a matrix. Along that axis it is no elementwise function of its carry. If the axis is short, its elements
become carries of their own, and the step becomes a program on elements (scalar replacement of aggregates). Moving
elements then costs nothing, and a sum over them is a few additions. A window then holds what former steps read; a small
matrix is a system of coupled carries.

Elements keep their axis, with size one, so that what is elementwise along the other axes stays as it is.

Shapes. A carry (..., n, ...) becomes n carries (..., 1, ...).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..ir.builder import Builder, downstream, upstream
from ..ir.coordinates import sink_moves
from ..ir.fx import (
    MATMULS,
    add_argument,
    arg,
    is_elementwise,
    is_pointwise,
    is_tensor,
    known,
    sum_dims,
    take_place,
    value,
)
from ..ir.moves import (
    SEVERAL,
    Cat,
    Copy,
    Expand,
    Flip,
    Moved,
    NotThis,
    Pad,
    Permute,
    Rules,
    Slice,
    View,
    Write,
    emit,
    read,
)  # fmt: skip
from ..recurrence.affine import clamp_shares
from .body import Traced
from .read_back import Origin

aten = torch.ops.aten

# Longer axes stay.
LONGEST = 8


@dataclass(frozen=True)
class Elements:
    """A value whose elements along an axis are values of their own, each with that axis of size one."""

    axis: int
    parts: tuple[Node, ...]


def splits(traced: Traced, training: bool) -> Iterator[Traced]:
    """Return bodies with elements in place of values: of few carries first, then of all that gain from it.

    Args:
        traced: The body; stays as it is.
        training: Whether a result of the loop has a gradient.
    """
    splitter = _Splitter(traced, {}, training)
    base = splitter.run()  # what a step puts side by side may be carries already
    least = splitter.rank
    if base is not None:
        yield base
    alone = {
        i: found for i in range(traced.carried) if (found := _split_one(traced, {}, i, least, training)) is not None
    }
    for body, *_ in alone.values():
        yield body
    chosen: dict[int, int] = {}
    for i in alone if len(alone) > 1 else ():
        found = _split_one(traced, chosen, i, least, training)
        if found is not None:
            last, chosen[i], least = found
    if len(chosen) > 1:
        yield last


def _split_one(
    traced: Traced, chosen: dict[int, int], i: int, least: tuple[int, int], training: bool
) -> tuple[Traced, int, tuple[int, int]] | None:
    """Split one more carry along its best axis: the body, the axis and its rank; None if it does not gain from it."""
    carry, best = traced.placeholders[i], None
    sizes = [known(size) for size in value(carry).shape] if is_tensor(carry) else []
    for axis in reversed([d for d, size in enumerate(sizes) if isinstance(size, int) and 2 <= size <= LONGEST]):
        splitter = _Splitter(traced, {**chosen, i: axis}, training)
        attempt = splitter.run()
        if attempt is not None and splitter.rank < least:
            best, least = (attempt, axis, splitter.rank), splitter.rank
    return best


class _Splitter:
    """Splits some carries of a body along an axis each."""

    def __init__(self, traced: Traced, chosen: dict[int, int], training: bool) -> None:
        self.graph, self.training = Graph(), training
        self.copies: dict[Node, Node] = {}
        output: Any = self.graph.graph_copy(traced.module.graph, self.copies)
        contents = [self.copies[write.content] for write in traced.writes]
        self.graph.output((*output, *contents))
        for node in self.graph.find_nodes(op="call_function", target=aten.copy_.default):
            self.graph.erase_node(node)
        _multiply_out_columns(self.graph)
        self.traced, self.chosen = traced, chosen
        self.elements: dict[Node, Elements] = {}
        self.depends: set[Node] = set()
        self.cuts = self.mixed = 0
        self.cyclic: set[Node] = set()
        for carry, new in zip(traced.placeholders[: traced.carried], output, strict=False):
            if isinstance(new, Node):
                self.cyclic |= downstream(self.copies[carry]) & upstream(new)
        self.build: Any = None
        self.like = next(x for x in map(self.copies.__getitem__, traced.placeholders) if is_tensor(x))

    @property
    def rank(self) -> tuple[int, int]:
        """How good it is: few values had to be cut or put together, many operations moved or mixed elements."""
        return self.cuts, -self.mixed

    def run(self) -> Traced | None:
        """Return the new body, or None if splitting is of no use."""
        traced, graph = self.traced, self.graph
        placeholders = [self.copies[x] for x in traced.placeholders]
        origins: list[Origin] = []
        split_at: dict[Node, list[Node]] = {}
        for i, axis in self.chosen.items():
            carry = placeholders[i]
            split_at[carry] = []
            for at in range(value(carry).shape[axis]):
                with graph.inserting_before(carry):
                    part = add_argument(graph, f"{carry.name}_at_{at}")
                with value(carry).fake_mode:  # type: ignore[attr-defined]
                    part.meta["val"] = aten.slice.Tensor(value(carry), axis, at, at + 1).clone()
                split_at[carry].append(part)
                origins.append(Origin(i, axis, at, keep=True))
            self.elements[carry] = Elements(axis, tuple(split_at[carry]))
            self.depends.update(split_at[carry])
        self.depends |= set(placeholders[: traced.carried])
        for node in list(graph.nodes):
            if node.op != "call_function" or not any(x in self.depends for x in node.all_input_nodes):
                continue
            self.depends.add(node)
            if node.target in SEVERAL:
                continue  # read with each of its parts
            moved = read(node)
            inputs = node.all_input_nodes if moved is None else dict.fromkeys(moved.nodes())
            split_inputs = [x for x in inputs if x in self.elements]
            if not split_inputs and node.target is not aten.cat.default and not is_pointwise(node.target):
                continue
            self.build = Builder(node, like=self.like)
            try:
                self.mixed += self._step(node, moved)
            except NotThis:
                self.build.undo()
                self.cuts += len(split_inputs)
                for x in split_inputs if node.target is not operator.getitem else ():
                    node.replace_input_with(x, self.whole(x))
        return self._result(placeholders, split_at, origins)

    def _step(self, node: Any, moved: Moved | None) -> bool:
        """Give a node's value by elements; tell whether that moved or mixed elements."""
        if moved is not None:
            made = self._moved(node, moved)
        elif node.target in _RULES:
            made = _RULES[node.target](self, node)
        elif is_elementwise(node.target):
            made = _pointwise(self, node)
        else:
            raise NotThis
        if made is None:
            return False
        found, mixes = made
        found = _alone(found)
        if isinstance(found, Elements):
            self.elements[node] = found
            self.depends.update(found.parts)
        elif found is not node:
            node.replace_all_uses_with(found)
            self.depends.add(found)
        return mixes

    def _moved(self, node: Node, moved: Moved) -> _Made:
        """Move elements; a cat of what has none so far may be their beginning."""
        reader = _Mover(self)
        found = ELEMENTS.apply(reader, moved, lambda x: self.elements.get(x, x))
        return found, reader.moves

    # Elements of a value ---------------------------------------------------------------------

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Insert a call before the node at hand."""
        new = self.build.call(target, *args, **kwargs)
        if any(x in self.depends for x in new.all_input_nodes):
            self.depends.add(new)
        return new

    def emit(self, x: Moved, *given: Node) -> Node:
        """Insert a move before the node at hand."""
        count = len(self.build.added)
        new = emit(self.build, x, *given)
        for made in self.build.added[count:]:
            if any(y in self.depends for y in made.all_input_nodes):
                self.depends.add(made)
        return new

    def along(self, x: Node, axis: int) -> tuple[Node, ...]:
        """Return a value's elements along an axis."""
        found = self.elements.get(x)
        if found is not None:
            if found.axis != axis:
                raise NotThis
            return found.parts
        size = known(value(x).shape[axis])
        if not isinstance(size, int) or size > 2 * LONGEST:
            raise NotThis
        if size == 1:
            return (x,)
        self.cuts += x in self.depends
        return tuple(self.call(aten.slice.Tensor, x, axis, at, at + 1) for at in range(size))

    def whole(self, x: Any) -> Any:
        """Return a value in one piece."""
        found = self.elements.get(x)
        return x if found is None else self.call(aten.cat.default, list(found.parts), found.axis)

    def spread(self, node: Node) -> set[int]:
        """Return the short axes, counted from the last, along which an operation repeats what leads back to a carry."""
        if node not in self.cyclic:
            return set()
        shape, axes = value(node).shape, set()
        for x in node.all_input_nodes:
            if x in self.depends and is_tensor(x):
                own = value(x).shape
                pairs = [(d, known(shape[d])) for d in range(-len(shape), 0) if len(own) < -d or known(own[d]) == 1]
                axes |= {d for d, size in pairs if isinstance(size, int) and 2 <= size <= LONGEST}
        return axes

    def summed(self, terms: Sequence[Node]) -> Node:
        """Return the sum of values."""
        return functools.reduce(functools.partial(self.call, aten.add.Tensor), terms)

    # The new body ----------------------------------------------------------------------------

    def _result(
        self, placeholders: list[Node], split_at: dict[Node, list[Node]], origins: list[Origin]
    ) -> Traced | None:
        traced, graph = self.traced, self.graph
        output: Any = graph.output_node()
        self.build = Builder(output, like=self.like)
        results = list(output.args[0])
        news: list[Any] = []
        try:
            for i, axis in self.chosen.items():
                if not is_tensor(results[i]) or value(results[i]).shape != value(traced.placeholders[i]).shape:
                    return None  # the first step begins with another shape
                news += self.along(results[i], axis)
        except NotThis:
            return None
        results = [self.whole(x) if isinstance(x, Node) else x for x in results]
        output.args = ((*results, *news),)
        sunk = sink_moves(graph, [x for x in self.depends if x.op == "placeholder"])
        if not (self.mixed or sunk):
            return None
        results, news = list(output.args[0][: len(results)]), output.args[0][len(results) :]
        ends = len(traced.results)
        parts = [part for carry in split_at.values() for part in carry]
        names = [f"{traced.names[o.operand]}[{', '.join([':'] * o.dim + [str(o.at)])}]" for o in origins]  # type: ignore[operator]
        return replace(
            traced, module=GraphModule(traced.module, graph), step=self.copies[traced.step],
            placeholders=placeholders + parts, results=results[:ends], fixed=[*traced.fixed, *origins],
            writes=[replace(write, content=x) for write, x in zip(traced.writes, results[ends:], strict=True)],
            elements={part: (new, name) for part, new, name in zip(parts, news, names, strict=True)},
        )  # fmt: skip


def _multiply_out_columns(graph: Graph) -> None:
    """Write products of a column and a row, which sum nothing, as elementwise ones."""
    for node in list(graph.nodes):
        if node.target not in MATMULS or node.kwargs:
            continue
        if known(value(node.args[0]).shape[-1]) == 1:
            with graph.inserting_before(node):
                new = graph.call_function(aten.mul.Tensor, node.args)
            take_place(new, node)


# Operations: what a node is by elements (or another node), and whether elements are moved or mixed; None for as it is.
_Made = tuple[Elements | Node, bool] | None


def _pointwise(splitter: _Splitter, node: Any) -> _Made:
    rank = value(node).dim()
    own = [x for x in node.all_input_nodes if x in splitter.elements]
    axes = {splitter.elements[x].axis - value(x).dim() for x in own} if own else splitter.spread(node)
    if not axes:
        return None
    if len(axes) != 1:
        raise NotThis
    (back,) = axes
    axis = rank + back
    count = known(value(node).shape[axis])
    if any(len(splitter.elements[x].parts) != count for x in own):
        raise NotThis

    def taken(at: int, x: Any) -> Any:
        if not is_tensor(x) or value(x).dim() < -back or known(value(x).shape[back]) == 1:
            return x
        return splitter.along(x, value(x).dim() + back)[at]

    parts = []
    for at in range(count):
        args = torch.fx.node.map_arg(node.args, functools.partial(taken, at))
        kwargs = torch.fx.node.map_arg(node.kwargs, functools.partial(taken, at))
        parts.append(splitter.call(node.target, *args, **kwargs))
    return Elements(axis, tuple(parts)), False


class _Mover:
    """Moves elements of the values of one node."""

    def __init__(self, splitter: _Splitter) -> None:
        self.call, self.build, self.splitter = splitter.call, splitter.build, splitter
        self.moves = False

    def along(self, x: Elements | Node, axis: int) -> tuple[Node, ...]:
        """Return a value's elements along an axis."""
        if isinstance(x, Node):
            return self.splitter.along(x, axis)
        if x.axis != axis:
            raise NotThis
        return x.parts

    def each(self, x: Moved, axis: int, *given: tuple[Node, ...]) -> Elements:
        """Move the elements of one position after the other, which keep their axis."""
        shape = tuple(1 if d == axis else size for d, size in enumerate(x.shape))
        parts = (self.splitter.emit(replace(x, shape=shape), *row) for row in zip(*given, strict=True))
        return Elements(axis, tuple(parts))


def _alone(x: Elements | Node) -> Elements | Node:
    """Return a single element as a value."""
    return x.parts[0] if isinstance(x, Elements) and len(x.parts) == 1 else x


ELEMENTS: Rules[_Mover, Elements | Node] = Rules()


@ELEMENTS.on(Copy, View, Permute, Expand, Pad)
def _kept(mover: _Mover, x: Moved, found: Elements | Node) -> Elements | Node:
    """Move whole elements, along axes that are not theirs."""
    if isinstance(found, Node):
        return mover.splitter.emit(x, found)
    axis = found.axis
    match x:
        case View():
            before, size = math.prod(x.given[:axis]), x.given[axis]
            axes = [d for d, n in enumerate(x.shape) if n == size and math.prod(x.shape[:d]) == before]
            if not axes:
                raise NotThis
            axis = axes[0]
        case Permute():
            axis = x.order.index(axis)
        case Expand():
            axis += len(x.shape) - len(x.given)
        case Pad() if x.dim == axis:
            raise NotThis
    return mover.each(x, axis, found.parts)


@ELEMENTS.on(Slice)
def _slice(mover: _Mover, x: Slice, found: Elements | Node) -> Elements | Node:
    if isinstance(found, Node) or x.dim != found.axis:
        return mover.splitter.emit(x, found) if isinstance(found, Node) else mover.each(x, found.axis, found.parts)
    if not isinstance(x.start, int):
        raise NotThis
    kept = found.parts[slice(x.start, x.stop, x.step)]
    if not kept:
        raise NotThis
    mover.moves |= len(kept) != len(found.parts)
    return _alone(Elements(x.dim, kept))


@ELEMENTS.on(Flip)
def _flip(mover: _Mover, x: Flip, found: Elements | Node) -> Elements | Node:
    if isinstance(found, Node):
        return mover.splitter.emit(x, found)
    if found.axis in x.dims:
        mover.moves, found = True, Elements(found.axis, found.parts[::-1])
    rest = tuple(d for d in x.dims if d != found.axis)
    return mover.each(replace(x, dims=rest), found.axis, found.parts) if rest else found


@ELEMENTS.on(Cat)
def _cat(mover: _Mover, x: Cat, *found: Elements | Node) -> Elements | Node:
    dim, axes = x.dim, {part.axis for part in found if isinstance(part, Elements)}
    if axes and axes != {dim}:
        axis = next(iter(axes))
        return mover.each(x, axis, *(mover.along(part, axis) for part in found))
    joined = sum((mover.along(part, dim) for part in found), ())
    if len(joined) > 2 * LONGEST:
        raise NotThis
    mover.moves = True
    return Elements(dim, joined)


@ELEMENTS.on(Write)
def _write(mover: _Mover, x: Write, whole: Elements | Node, part: Elements | Node) -> Elements | Node:
    if not isinstance(x.start, int):
        raise NotThis
    parts = list(mover.along(whole, x.dim))
    where = range(len(parts))[slice(x.start, x.stop, x.step)]
    for at, new in zip(where, mover.along(part, x.dim), strict=True):
        parts[at] = new
    mover.moves = True
    return Elements(x.dim, tuple(parts))


def _sum(splitter: _Splitter, node: Any) -> _Made:
    found = splitter.elements[node.args[0]]
    dims, keep = {*sum_dims(node)}, bool(arg(node, 2, "keepdim", False))
    if found.axis not in dims:
        axis = found.axis if keep else found.axis - sum(d < found.axis for d in dims)
        return Elements(
            axis, tuple(splitter.call(node.target, x, *node.args[1:], **node.kwargs) for x in found.parts)
        ), False
    if node.kwargs.keys() - {"dim", "keepdim"}:
        raise NotThis
    total = splitter.summed(found.parts)
    if node.target is aten.mean.dim:
        total = splitter.call(aten.div.Tensor, total, len(found.parts))
    others = sorted(dims - {found.axis})
    if others:
        total = splitter.call(node.target, total, others, True)
    return (total if keep else splitter.call(aten.squeeze.dims, total, sorted(dims))), True


def _largest(splitter: _Splitter, node: Any) -> _Made:
    """Maxima along the axis, one element after the other; with positions (``max.dim``), if nothing reads those."""
    found, single = splitter.elements[node.args[0]], node.target in (aten.max.dim, aten.min.dim)
    keep = arg(node, 2, "keepdim", False)
    if sum_dims(node) != [found.axis] or (single and any(user.args[1] != 0 for user in node.users)):
        raise NotThis
    # Equal items share a gradient: three do not as by pairs, and since torch 2.14 no clamp hands it to the first.
    by_pairs = clamp_shares(False)[0] == 1.0 if single else len(found.parts) < 3 or node.target not in _SHARED
    if splitter.training and not by_pairs:
        raise NotThis
    larger = _LARGEST[node.target] if splitter.training else _VALUES.get(node.target, _LARGEST[node.target])
    total = functools.reduce(functools.partial(splitter.call, larger), found.parts)
    total = total if keep else splitter.call(aten.squeeze.dim, total, found.axis)
    if not single:
        return total, True
    for user in list(node.users):
        user.replace_all_uses_with(total)
    return node, True


# Maxima along an axis, and of two values. Of equal ones, ``max.dim`` hands its gradient to the first.
_LARGEST = {
    aten.amax.default: aten.maximum.default,
    aten.amin.default: aten.minimum.default,
    aten.max.dim: aten.clamp_min.Tensor,
    aten.min.dim: aten.clamp_max.Tensor,
    aten.logsumexp.default: aten.logaddexp.default,
}
_SHARED = (aten.amax.default, aten.amin.default)
_VALUES = {
    aten.max.dim: aten.maximum.default,
    aten.min.dim: aten.minimum.default,
}  # the same where nothing has a gradient


def _product(splitter: _Splitter, node: Any) -> _Made:
    """Multiply matrices, or a matrix and a vector, one of which is known by elements along what is summed over."""
    bias, (a, b) = (node.args[0], node.args[1:3]) if node.target is aten.addmm.default else (None, node.args[:2])
    rows, columns = value(a).dim() - 2, value(a).dim() - 1
    split, vector = a in splitter.elements, value(b).dim() == 1  # else the summed axis of b is that of a's rows
    if node.kwargs or (split and b in splitter.elements):
        raise NotThis
    left, right = splitter.along(a, columns), splitter.along(b, 0 if vector else rows)
    mine, other = (left, right) if split else (right, left)
    # The result has elements along the axis that only the other factor has: each is a sum with its parts there.
    free = columns if split else rows
    count = 1 if split and vector else known(value(b if split else a).shape[free])
    if not isinstance(count, int) or count > 2 * LONGEST:
        raise NotThis
    out = []
    for j in range(count):
        parts = other if count == 1 else [splitter.call(aten.slice.Tensor, x, free, j, j + 1) for x in other]
        if vector and not split:
            parts = [splitter.call(aten.squeeze.dim, x, columns) for x in parts]
        factors = zip(*((mine, parts) if split else (parts, mine)), strict=True)
        out.append(splitter.summed([splitter.call(aten.mul.Tensor, x, y) for x, y in factors]))
    found: Elements | Node = out[0] if count == 1 else Elements(free, tuple(out))
    if split and vector:
        found = splitter.call(aten.squeeze.dim, out[0], columns)
    if bias is None:
        return found, True
    if isinstance(found, Node):
        return splitter.call(aten.add.Tensor, bias, found), True
    own, back = value(bias).dim(), free - value(node).dim()
    shared = own < -back or known(value(bias).shape[back]) == 1
    addends = [bias] * count if shared else splitter.along(bias, own + back)
    return Elements(free, tuple(splitter.call(aten.add.Tensor, *pair) for pair in zip(addends, out, strict=True))), True


def _convolution(splitter: _Splitter, node: Any) -> _Made:
    """Convolve a window along its one axis, channel by channel or over channels."""
    x, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
    if transposed or value(x).dim() != 3 or splitter.elements[x].axis != 2 or weight in splitter.depends:
        raise NotThis
    window, taps = splitter.elements[x].parts, known(value(weight).shape[2])
    depthwise = groups == value(x).shape[1] and value(weight).shape[0] == groups
    if not depthwise and groups != 1:
        raise NotThis
    out = []
    for at in range(known(value(node).shape[2])):
        terms = []
        for k in range(taps):
            place = at * stride[0] + k * dilation[0] - padding[0]
            if not 0 <= place < len(window):
                continue
            tap = splitter.call(aten.select.int, weight, 2, k)
            if depthwise:
                terms.append(splitter.call(aten.mul.Tensor, window[place], tap))
            else:
                row = splitter.call(aten.squeeze.dim, window[place], 2)
                product = splitter.call(aten.mm.default, row, splitter.call(aten.t.default, tap))
                terms.append(splitter.call(aten.unsqueeze.default, product, 2))
        if not terms:
            raise NotThis
        total = splitter.summed(terms)
        if bias is not None:
            total = splitter.call(aten.add.Tensor, total, splitter.call(aten.unsqueeze.default, bias, 1))
        out.append(total)
    return Elements(2, tuple(out)), True


_RULES: dict[Any, Callable[[_Splitter, Any], _Made]] = {
    **dict.fromkeys((aten.sum.dim_IntList, aten.mean.dim), _sum),
    **dict.fromkeys(_LARGEST, _largest),
    **dict.fromkeys((aten.mm.default, aten.bmm.default, aten.mv.default, aten.addmm.default), _product),
    aten.convolution.default: _convolution,
}
