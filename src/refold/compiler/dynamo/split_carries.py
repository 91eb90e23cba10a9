"""Carries of a few elements that a step moves or mixes become one carry per element.

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
from ..ir.fx import arg, is_tensor, known, value
from ..recurrence.vectorize import is_pointwise
from .body import Traced
from .coordinates import order_of, sink_moves
from .read_back import Origin

aten = torch.ops.aten
prims = torch.ops.prims

# Longer axes stay.
LONGEST = 8

_COPIES = (
    prims.convert_element_type.default, aten._to_copy.default, aten.clone.default, aten.alias.default,
    aten.detach.default,
)  # fmt: skip


class _Whole(Exception):
    """An operation has no form on elements."""


@dataclass(frozen=True)
class Elements:
    """A value whose elements along an axis are values of their own, each with that axis of size one."""

    axis: int
    parts: tuple[Node, ...]


def splits(traced: Traced) -> Iterator[Traced]:
    """Return bodies with elements in place of values: of few carries first, then of all that gain from it.

    Args:
        traced: The body; stays as it is.
    """
    splitter = _Splitter(traced, {})
    base = splitter.run()  # what a step puts side by side may be carries already
    least = splitter.rank
    if base is not None:
        yield base
    alone = {i: found for i in range(traced.carried) if (found := _split_one(traced, {}, i, least)) is not None}
    for body, *_ in alone.values():
        yield body
    chosen: dict[int, int] = {}
    for i in alone if len(alone) > 1 else ():
        found = _split_one(traced, chosen, i, least)
        if found is not None:
            last, chosen[i], least = found
    if len(chosen) > 1:
        yield last


def _split_one(
    traced: Traced, chosen: dict[int, int], i: int, least: tuple[int, int]
) -> tuple[Traced, int, tuple[int, int]] | None:
    """Split one more carry along its best axis: the body, the axis and its rank; None if it does not gain from it."""
    carry, best = traced.placeholders[i], None
    sizes = [known(size) for size in value(carry).shape] if is_tensor(carry) else []
    for axis in reversed([d for d, size in enumerate(sizes) if isinstance(size, int) and 2 <= size <= LONGEST]):
        splitter = _Splitter(traced, {**chosen, i: axis})
        attempt = splitter.run()
        if attempt is not None and splitter.rank < least:
            best, least = (attempt, axis, splitter.rank), splitter.rank
    return best


class _Splitter:
    """Splits some carries of a body along an axis each."""

    def __init__(self, traced: Traced, chosen: dict[int, int]) -> None:
        self.graph = Graph()
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
                    part = graph.placeholder(f"{carry.name}_at_{at}")
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
            split_inputs = [x for x in node.all_input_nodes if x in self.elements]
            if not split_inputs and node.target is not aten.cat.default and not is_pointwise(node.target):
                continue
            self.build = Builder(node, like=self.like)
            try:
                self.mixed += self._step(node)
            except _Whole:
                self.build.undo()
                self.cuts += len(split_inputs)
                if node.target is operator.getitem:
                    continue
                for x in split_inputs:
                    node.replace_input_with(x, self.whole(x))
        return self._result(placeholders, split_at, origins)

    def _step(self, node: Any) -> bool:
        """Give a node's value by elements; tell whether that moved or mixed elements."""
        rule = _RULES.get(node.target)
        if rule is not None:
            made = rule(self, node)
        elif is_pointwise(node.target) or node.target in _COPIES:
            made = _pointwise(self, node)
        else:
            raise _Whole
        if made is None:
            return False
        found, mixes = made
        if isinstance(found, Elements) and len(found.parts) == 1:
            found = found.parts[0]
        if isinstance(found, Elements):
            self.elements[node] = found
            self.depends.update(found.parts)
        elif found is not node:
            node.replace_all_uses_with(found)
            self.depends.add(found)
        return mixes

    # Elements of a value ---------------------------------------------------------------------

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Insert a call before the node at hand."""
        new = self.build.call(target, *args, **kwargs)
        if any(x in self.depends for x in new.all_input_nodes):
            self.depends.add(new)
        return new

    def along(self, x: Node, axis: int) -> tuple[Node, ...]:
        """Return a value's elements along an axis."""
        found = self.elements.get(x)
        if found is not None:
            if found.axis != axis:
                raise _Whole
            return found.parts
        size = known(value(x).shape[axis])
        if not isinstance(size, int) or size > 2 * LONGEST:
            raise _Whole
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
        out = terms[0]
        for term in terms[1:]:
            out = self.call(aten.add.Tensor, out, term)
        return out

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
        except _Whole:
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
        if node.target not in (aten.mm.default, aten.bmm.default) or node.kwargs:
            continue
        if known(value(node.args[0]).shape[-1]) == 1:
            with graph.inserting_before(node):
                new = graph.call_function(aten.mul.Tensor, node.args)
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
            graph.erase_node(node)


# Operations: what a node is by elements (or another node), and whether elements are moved or mixed; None for as it is.
_Made = tuple[Elements | Node, bool] | None


def _pointwise(self: _Splitter, node: Any) -> _Made:
    rank = value(node).dim()
    own = [x for x in node.all_input_nodes if x in self.elements]
    axes = {self.elements[x].axis - value(x).dim() for x in own} if own else self.spread(node)
    if not axes:
        return None
    if len(axes) != 1:
        raise _Whole
    (back,) = axes
    axis = rank + back
    count = known(value(node).shape[axis])
    if any(len(self.elements[x].parts) != count for x in own):
        raise _Whole

    def taken(at: int, x: Any) -> Any:
        if not is_tensor(x) or value(x).dim() < -back or known(value(x).shape[back]) == 1:
            return x
        return self.along(x, value(x).dim() + back)[at]

    parts = []
    for at in range(count):
        args = torch.fx.node.map_arg(node.args, functools.partial(taken, at))
        kwargs = torch.fx.node.map_arg(node.kwargs, functools.partial(taken, at))
        parts.append(self.call(node.target, *args, **kwargs))
    return Elements(axis, tuple(parts)), False


def _dim(node: Any, at: int = 1, name: str = "dim", default: int = 0) -> int:
    return arg(node, at, name, default) % value(node.args[0]).dim()


def _slice(self: _Splitter, node: Any) -> _Made:
    found, dim = self.elements[node.args[0]], _dim(node)
    rest = [x for x in node.args[2:] if isinstance(x, Node)]
    if rest:
        raise _Whole
    if dim != found.axis:
        return Elements(found.axis, tuple(self.call(node.target, x, *node.args[1:]) for x in found.parts)), False
    start, end, step = (arg(node, at, name, None) for at, name in ((2, "start"), (3, "end"), (4, "step")))
    kept = found.parts[slice(start, None if end is None or end > 1 << 60 else end, step)]
    return Elements(dim, kept), len(kept) != len(found.parts)


def _select(self: _Splitter, node: Any) -> _Made:
    found, dim = self.elements[node.args[0]], _dim(node)
    at = arg(node, 2, "index")
    if isinstance(at, Node):
        raise _Whole
    if dim != found.axis:
        axis = found.axis - (dim < found.axis)
        return Elements(axis, tuple(self.call(aten.select.int, x, dim, at) for x in found.parts)), False
    return self.call(aten.squeeze.dim, found.parts[at], dim), True


def _unbind(self: _Splitter, node: Any) -> _Made:
    return self.elements[node.args[0]], False  # see _getitem


def _getitem(self: _Splitter, node: Any) -> _Made:
    source, at = node.args
    if source.target is aten.unbind.int:
        found, dim = self.elements[source.args[0]], _dim(source)
        if dim == found.axis:
            return self.call(aten.squeeze.dim, found.parts[at], dim), True
    if source.target in (aten.split.Tensor, aten.split_with_sizes.default):
        found, dim = self.elements[source.args[0]], _dim(source, 2)
        sizes = [x.shape[dim] for x in source.meta["val"]]
        if dim == found.axis:
            start = sum(sizes[:at])
            return Elements(dim, found.parts[start : start + sizes[at]]), True
    raise _Whole


def _cat(self: _Splitter, node: Any) -> _Made:
    inputs, dim = node.args[0], arg(node, 1, "dim", 0) % value(node).dim()
    axes = {self.elements[x].axis for x in inputs if x in self.elements}
    if axes and axes != {dim}:
        parts = zip(*(self.along(x, next(iter(axes))) for x in inputs), strict=True)
        return Elements(next(iter(axes)), tuple(self.call(aten.cat.default, list(row), dim) for row in parts)), False
    joined = sum((self.along(x, dim) for x in inputs), ())
    if len(joined) > 2 * LONGEST:
        raise _Whole
    return Elements(dim, joined), True


def _roll(self: _Splitter, node: Any) -> _Made:
    found = self.elements[node.args[0]]
    shifts, dims = ([x] if isinstance(x, int) else list(x) for x in (node.args[1], arg(node, 2, "dims", [])))
    if [d % value(node).dim() for d in dims] != [found.axis]:
        raise _Whole
    k = -shifts[0] % len(found.parts)
    return Elements(found.axis, found.parts[k:] + found.parts[:k]), True


def _flip(self: _Splitter, node: Any) -> _Made:
    found = self.elements[node.args[0]]
    if [d % value(node).dim() for d in node.args[1]] != [found.axis]:
        raise _Whole
    return Elements(found.axis, found.parts[::-1]), True


def _sum(self: _Splitter, node: Any) -> _Made:
    found, rank = self.elements[node.args[0]], value(node.args[0]).dim()
    given = arg(node, 1, "dim")
    dims = {d % rank for d in ([given] if isinstance(given, int) else given or range(rank))}
    keep = bool(arg(node, 2, "keepdim", False))
    if found.axis not in dims:
        axis = found.axis if keep else found.axis - sum(d < found.axis for d in dims)
        return Elements(
            axis, tuple(self.call(node.target, x, *node.args[1:], **node.kwargs) for x in found.parts)
        ), False
    if node.kwargs.keys() - {"dim", "keepdim"}:
        raise _Whole
    total = self.summed(found.parts)
    if node.target is aten.mean.dim:
        total = self.call(aten.div.Tensor, total, len(found.parts))
    others = sorted(dims - {found.axis})
    if others:
        total = self.call(node.target, total, others, True)
    return (total if keep else self.call(aten.squeeze.dims, total, sorted(dims))), True


def _largest(self: _Splitter, node: Any) -> _Made:
    """Maxima along the axis, one element after the other; with positions (``max.dim``), if nothing reads those."""
    found, single = self.elements[node.args[0]], node.target in (aten.max.dim, aten.min.dim)
    given, keep = arg(node, 1, "dim", None), arg(node, 2, "keepdim", False)
    rank = value(node.args[0]).dim()
    dims = {d % rank for d in ([given] if isinstance(given, int) else given or range(rank))}
    if dims != {found.axis} or (single and any(user.args[1] != 0 for user in node.users)):
        raise _Whole
    total = functools.reduce(functools.partial(self.call, _LARGEST[node.target]), found.parts)
    total = total if keep else self.call(aten.squeeze.dim, total, found.axis)
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


def _scatter(self: _Splitter, node: Any) -> _Made:
    base, source = node.args[:2]
    dim = arg(node, 2, "dim", 0) % value(base).dim()
    if any(isinstance(x, Node) for x in node.args[2:]):
        raise _Whole
    parts = list(self.along(base, dim))
    if node.target is aten.select_scatter.default:
        if source in self.elements:
            raise _Whole
        parts[arg(node, 3, "index")] = self.call(aten.unsqueeze.default, source, dim)
    else:
        where = range(len(parts))[slice(arg(node, 3, "start"), _end(arg(node, 4, "end")), arg(node, 5, "step"))]
        for at, part in zip(where, self.along(source, dim), strict=True):
            parts[at] = part
    return Elements(dim, tuple(parts)), True


def _end(end: Any) -> Any:
    return None if end is None or end > 1 << 60 else end


def _view(self: _Splitter, node: Any) -> _Made:
    found = self.elements[node.args[0]]
    given, wanted = ([known(n) for n in value(x).shape] for x in (node.args[0], node))
    size = given[found.axis]
    before = math.prod(given[: found.axis])
    axes = [d for d, n in enumerate(wanted) if n == size and math.prod(wanted[:d]) == before]
    if not axes:
        raise _Whole
    axis = axes[0]
    shape = [1 if d == axis else n for d, n in enumerate(wanted)]
    return Elements(axis, tuple(self.call(aten.reshape.default, x, shape) for x in found.parts)), False


def _unsqueeze(self: _Splitter, node: Any) -> _Made:
    found, dim = self.elements[node.args[0]], node.args[1] % value(node).dim()
    return Elements(found.axis + (dim <= found.axis), tuple(self.call(node.target, x, dim) for x in found.parts)), False


def _squeeze(self: _Splitter, node: Any) -> _Made:
    found, rank = self.elements[node.args[0]], value(node.args[0]).dim()
    shape = [known(n) for n in value(node.args[0]).shape]
    given = node.args[1] if len(node.args) > 1 else range(rank)
    dims = [d % rank for d in ([given] if isinstance(given, int) else given)]
    dims = [d for d in dims if shape[d] == 1]
    if found.axis in dims:
        raise _Whole
    axis = found.axis - sum(d < found.axis for d in dims)
    return Elements(axis, tuple(self.call(aten.squeeze.dims, x, dims) for x in found.parts)), False


def _permute(self: _Splitter, node: Any) -> _Made:
    found = self.elements[node.args[0]]
    order = order_of(node)
    parts = tuple(self.call(aten.permute.default, x, order) for x in found.parts)
    return Elements(order.index(found.axis), parts), False


def _expand(self: _Splitter, node: Any) -> _Made:
    found, shape = self.elements[node.args[0]], list(value(node).shape)
    axis = found.axis + len(shape) - value(node.args[0]).dim()
    shape[axis] = 1
    return Elements(axis, tuple(self.call(node.target, x, shape) for x in found.parts)), False


def _product(self: _Splitter, node: Any) -> _Made:
    """Multiply matrices, or a matrix and a vector, one of which is known by elements along what is summed over."""
    bias, (a, b) = (node.args[0], node.args[1:3]) if node.target is aten.addmm.default else (None, node.args[:2])
    if node.kwargs:
        raise _Whole
    rows, columns = value(a).dim() - 2, value(a).dim() - 1
    vector = value(b).dim() == 1  # else the summed axis of b is that of a's rows
    inner = 0 if vector else rows
    left, right = self.along(a, columns), self.along(b, inner)
    free = rows if b in self.elements and a not in self.elements else value(node).dim() - 1
    mine, other = (left, right) if a in self.elements else (right, left)
    if a in self.elements and b in self.elements:
        raise _Whole
    out = []
    if a in self.elements:  # a column of a, times a row of b, whose elements are apart
        count = 1 if vector else known(value(b).shape[-1])
        if not isinstance(count, int) or count > 2 * LONGEST:
            raise _Whole
        for j in range(count):
            entries = (
                right if vector or count == 1 else [self.call(aten.slice.Tensor, x, rows + 1, j, j + 1) for x in right]
            )
            out.append(self.summed([self.call(aten.mul.Tensor, x, y) for x, y in zip(mine, entries, strict=True)]))
        free = rows + 1
    else:
        count = known(value(a).shape[rows])
        if not isinstance(count, int) or count > 2 * LONGEST:
            raise _Whole
        for j in range(count):
            entries = other if count == 1 else [self.call(aten.slice.Tensor, x, rows, j, j + 1) for x in other]
            if vector:
                entries = [self.call(aten.squeeze.dim, x, rows + 1) for x in entries]
            out.append(self.summed([self.call(aten.mul.Tensor, x, y) for x, y in zip(entries, mine, strict=True)]))
        free = rows
    if a in self.elements and vector:
        found: Elements | Node = self.call(aten.squeeze.dim, out[0], columns)
    else:
        found = out[0] if len(out) == 1 else Elements(free, tuple(out))
    if bias is not None:
        if isinstance(found, Elements):
            rank = value(node).dim()
            own = value(bias).dim()
            back = free - rank
            shared = own < -back or known(value(bias).shape[own + back]) == 1
            addends = [bias] * len(out) if shared else self.along(bias, own + back)
            found = Elements(free, tuple(self.call(aten.add.Tensor, y, x) for x, y in zip(out, addends, strict=True)))
        else:
            found = self.call(aten.add.Tensor, bias, found)
    return found, True


def _convolution(self: _Splitter, node: Any) -> _Made:
    """Convolve a window along its one axis, channel by channel or over channels."""
    x, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
    if transposed or value(x).dim() != 3 or self.elements[x].axis != 2 or weight in self.depends:
        raise _Whole
    window, taps = self.elements[x].parts, known(value(weight).shape[2])
    depthwise = groups == value(x).shape[1] and value(weight).shape[0] == groups
    if not depthwise and groups != 1:
        raise _Whole
    out = []
    for at in range(known(value(node).shape[2])):
        terms = []
        for k in range(taps):
            place = at * stride[0] + k * dilation[0] - padding[0]
            if not 0 <= place < len(window):
                continue
            tap = self.call(aten.select.int, weight, 2, k)
            if depthwise:
                terms.append(self.call(aten.mul.Tensor, window[place], tap))
            else:
                row = self.call(aten.squeeze.dim, window[place], 2)
                product = self.call(aten.mm.default, row, self.call(aten.t.default, tap))
                terms.append(self.call(aten.unsqueeze.default, product, 2))
        if not terms:
            raise _Whole
        total = self.summed(terms)
        if bias is not None:
            total = self.call(aten.add.Tensor, total, self.call(aten.unsqueeze.default, bias, 1))
        out.append(total)
    return Elements(2, tuple(out)), True


_RULES: dict[Any, Callable[[_Splitter, Any], _Made]] = {
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    **dict.fromkeys((aten.unbind.int, aten.split.Tensor, aten.split_with_sizes.default), _unbind),
    operator.getitem: _getitem,
    aten.cat.default: _cat,
    aten.roll.default: _roll,
    **dict.fromkeys((aten.flip.default, prims.rev.default), _flip),
    **dict.fromkeys((aten.sum.dim_IntList, aten.mean.dim), _sum),
    **dict.fromkeys(_LARGEST, _largest),
    **dict.fromkeys((aten.select_scatter.default, aten.slice_scatter.default), _scatter),
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.reshape.default), _view),
    aten.unsqueeze.default: _unsqueeze,
    **dict.fromkeys((aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default), _squeeze),
    **dict.fromkeys((aten.permute.default, aten.transpose.int, aten.t.default), _permute),
    aten.expand.default: _expand,
    **dict.fromkeys((aten.mm.default, aten.bmm.default, aten.mv.default, aten.addmm.default), _product),
    aten.convolution.default: _convolution,
}
