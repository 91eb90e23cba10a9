"""Permutations and merged axes of a step's values move down, to where they meet their inverse or a result.

A step may permute its state to multiply it, or merge axes for a matrix product, and undo that after it. Between the two
it is elementwise in other coordinates; in the state's own it is elementwise all along.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from ..ir.builder import Builder
from ..ir.fx import is_tensor, known, value
from ..recurrence.vectorize import is_pointwise

aten = torch.ops.aten
prims = torch.ops.prims

_COPIES = (
    prims.convert_element_type.default, aten._to_copy.default, aten.clone.default, aten.alias.default,
    aten.detach.default,
)  # fmt: skip
_RESHAPES = (
    aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default, aten.select.int, aten.unsqueeze.default,
    aten.expand.default,
)  # fmt: skip
_PERMUTES = (aten.permute.default, aten.transpose.int, aten.t.default)
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default)
_SQUEEZES = (aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default, aten.select.int)

# A value in the coordinates of its carry, and the order of axes that makes the node of it; None for another shape.
_Moved = tuple[Node, list[int] | None]


def order_of(node: Any) -> list[int]:
    """Return the order of axes that a permutation of two or more axes puts in place."""
    rank = value(node.args[0]).dim()
    if node.target is aten.permute.default:
        return [d % rank for d in node.args[1]]
    order = list(range(rank))
    i, j = (d % rank for d in node.args[1:3]) if node.target is aten.transpose.int else (0, rank - 1)
    order[i], order[j] = order[j], order[i]
    return order


def sink_moves(graph: Graph, carries: Sequence[Node]) -> bool:
    """Move permutations and merged axes of functions of carries down, in place; tell whether any has gone.

    Args:
        graph: A step.
        carries: The placeholders of what it carries.
    """
    # Axes may be merged after they were permuted: what was done last is undone first.
    shapes, orders = (_sink(graph, carries, by_shape) for by_shape in (True, False))
    return shapes or orders


def _sink(graph: Graph, carries: Sequence[Node], shapes: bool) -> bool:
    depends, moved = set(carries), dict[Node, _Moved]()
    gone = False
    for node in list(graph.nodes):
        if node.op != "call_function" or not any(x in depends for x in node.all_input_nodes):
            continue
        depends.add(node)
        if not is_tensor(node):
            continue
        build = Builder(node)
        found = _moved(build, node, moved, depends, shapes)
        for new in build.added:
            if any(x in depends for x in new.all_input_nodes):
                depends.add(new)
        if found is None:
            continue
        base, order = found
        if order is None and _without_ones(base) == _without_ones(node):
            gone = True
            node.replace_all_uses_with(build.call(aten.reshape.default, base, list(value(node).shape)))
            depends.update(build.added)
        elif order is not None and order == sorted(order):
            gone |= node.target in _PERMUTES
            node.replace_all_uses_with(base)
        elif order is not None and (kept := [d for d in order if value(base).shape[d] != 1]) == sorted(kept):
            gone = True  # only axes of size one have moved
            node.replace_all_uses_with(build.call(aten.reshape.default, base, list(value(node).shape)))
            depends.update(build.added)
        else:
            moved[node] = found
    graph.eliminate_dead_code()
    return gone


def _moved(build: Builder, node: Any, moved: dict[Node, _Moved], depends: set[Node], by_shape: bool) -> _Moved | None:
    """Read a node as a permutation of a value in the coordinates of its carry; None if it is none."""
    source: Any = node.args[0]
    if not by_shape and node.target in _PERMUTES and value(source).dim() > 1:
        own = order_of(node)
        base, before = moved.get(source, (source, list(range(len(own)))))
        return None if before is None else (base, [before[d] for d in own])
    if by_shape and node.target in _VIEWS[:3] and source in depends and source not in moved:
        return (source, None) if _without_ones(source) != _without_ones(node) else None
    inputs = [x for x in node.all_input_nodes if x in moved]
    if not inputs:
        return None
    if is_pointwise(node.target) or node.target in _COPIES:
        return _pointwise(build, node, moved, depends)
    if source not in moved or len(inputs) != 1:
        return None
    base, order = moved[source]
    shapes = [[known(n) for n in value(x).shape] for x in (source, node)]
    if node.target in _VIEWS and shapes[0] == shapes[1]:
        return base, order
    if order is None:
        ones = _without_ones(source) == _without_ones(node)
        return (base, None) if node.target in _VIEWS[:3] or (ones and node.target in _RESHAPES) else None
    rank = len(order)
    if node.target in _SQUEEZES:
        given = node.args[1] if len(node.args) > 1 else range(rank)
        dims = [d % rank for d in ([given] if isinstance(given, int) else given)]
        if node.target is not aten.select.int:
            dims = [d for d in dims if shapes[0][d] == 1]
        dropped = {order[d] for d in dims}
        kept = [d for i, d in enumerate(order) if i not in dims]
        after = [d - sum(x < d for x in dropped) for d in kept]
        if node.target is aten.select.int:
            return build.call(aten.select.int, base, order[dims[0]], *node.args[2:]), after
        return build.call(aten.squeeze.dims, base, sorted(dropped)), after
    if node.target is aten.unsqueeze.default:
        dim = node.args[1] % (rank + 1)
        return build.call(aten.unsqueeze.default, base, rank), [*order[:dim], rank, *order[dim:]]
    return None


def _pointwise(build: Builder, node: Any, moved: dict[Node, _Moved], depends: set[Node]) -> _Moved | None:
    rank = value(node).dim()
    orders = {None if moved[x][1] is None else tuple(moved[x][1]) for x in node.all_input_nodes if x in moved}  # type: ignore[arg-type]
    if len(orders) != 1:
        return None
    (order,) = orders
    if order is None:
        return _in_shape(build, node, moved, depends)
    if len(order) != rank or any(x in depends and x not in moved for x in node.all_input_nodes):
        return None
    inverse = sorted(range(rank), key=order.__getitem__)

    def back(x: Any) -> Any:
        if x in moved:
            return moved[x][0]
        if not is_tensor(x) or not value(x).dim():
            return x
        shape = list(value(x).shape)
        whole = build.call(aten.reshape.default, x, [1] * (rank - len(shape)) + shape) if len(shape) < rank else x
        return build.call(aten.permute.default, whole, inverse)

    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), back)
    return build.call(node.target, *args, **kwargs), list(order)


def _in_shape(build: Builder, node: Any, moved: dict[Node, _Moved], depends: set[Node]) -> _Moved | None:
    """Do an operation in the shape of its carry, which must have as many elements as the result."""
    bases = [moved[x][0] for x in node.all_input_nodes if x in moved]
    shape = list(value(bases[0]).shape)
    if any(list(value(base).shape) != shape for base in bases):
        return None
    others = [x for x in node.all_input_nodes if is_tensor(x) and x not in moved]
    if any(x in depends for x in others) or known(value(bases[0]).numel()) != known(value(node).numel()):
        return None

    def back(x: Any) -> Any:
        if x in moved:
            return moved[x][0]
        if not is_tensor(x):
            return x
        if known(value(x).numel()) == 1:
            return build.call(aten.reshape.default, x, [])
        whole = list(value(node).shape)
        x = x if list(value(x).shape) == whole else build.call(aten.expand.default, x, whole)
        return build.call(aten.reshape.default, x, shape)

    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), back)
    new = build.call(node.target, *args, **kwargs)
    return (new, None) if list(value(new).shape) == shape else None


def _without_ones(node: Node) -> list[Any]:
    return [size for size in map(known, value(node).shape) if size != 1]
