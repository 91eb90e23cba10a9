"""Permutations and merged axes of a step's values move down, to where they meet their inverse or a result.

A step may permute its state to multiply it, or merge axes for a matrix product, and undo that after it. Between the two
it is elementwise in other coordinates; in the state's own it is elementwise all along.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from .builder import Builder
from .fx import is_elementwise, is_tensor, known, value
from .moves import Copy, Expand, Moved, NotThis, Permute, Rules, Slice, View, emit, read

aten = torch.ops.aten

# A value in the coordinates of its carry, and the order of axes that makes the node of it; None for another shape.
_Moved = tuple[Node, list[int] | None]


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
            gone |= _is_permutation(node)
            node.replace_all_uses_with(base)
        elif order is not None and (kept := [d for d in order if value(base).shape[d] != 1]) == sorted(kept):
            gone = True  # only axes of size one have moved
            node.replace_all_uses_with(build.call(aten.reshape.default, base, list(value(node).shape)))
            depends.update(build.added)
        else:
            moved[node] = found
    graph.eliminate_dead_code()
    return gone


def _is_permutation(node: Node) -> bool:
    found = read(node)
    return found is not None and isinstance(found, Permute)


def _moved(build: Builder, node: Any, moved: dict[Node, _Moved], depends: set[Node], by_shape: bool) -> _Moved | None:
    """Read a node as a permutation of a value in the coordinates of its carry; None if it is none."""
    found = read(node)
    if found is not None and isinstance(source := found.of[0], Node) and source in depends and source not in moved:
        if by_shape and isinstance(found, View):
            return (source, None) if _without_ones(source) != _without_ones(node) else None
        if not by_shape and isinstance(found, Permute) and len(found.shape) > 1:
            return source, list(found.order)
    inputs = [x for x in node.all_input_nodes if x in moved]
    if not inputs:
        return None
    if found is None or isinstance(found, Copy):
        return _pointwise(build, node, moved, depends) if is_elementwise(node.target) or found is not None else None
    if len(inputs) != 1:
        return None
    base, order = moved[inputs[0]]
    chain = list(found.chain())
    if order is None:
        ones = all(type(x) in (View, Slice, Expand) for x in chain) and _without_ones(inputs[0]) == _without_ones(node)
        return (base, None) if (isinstance(found, View) and len(chain) == 1) or ones else None
    try:
        return ORDERS.apply(build, found, moved.__getitem__)
    except NotThis:
        return None


# Moves of a value in the coordinates of its carry, as an order of axes.
ORDERS: Rules[Builder, _Moved] = Rules()


@ORDERS.on(Permute)
def _permute(_: Builder, x: Permute, given: tuple[Node, list[int]]) -> _Moved:
    return given[0], [given[1][d] for d in x.order]


@ORDERS.on(Expand, Copy)
def _same(_: Builder, x: Moved, given: _Moved) -> _Moved:
    if x.shape != x.given:
        raise NotThis
    return given


@ORDERS.on(Slice)
def _slice(build: Builder, x: Slice, given: tuple[Node, list[int]]) -> _Moved:
    base, order = given
    return emit(build, replace(x, dim=order[x.dim]), base), order


@ORDERS.on(View)
def _view(build: Builder, x: Moved, given: tuple[Node, list[int]]) -> _Moved:
    """Drop axes of size one, and add others at the end."""
    (base, order), shape = given, [known(n) for n in value(given[0]).shape]
    kept = [d for d in order if shape[d] != 1]
    if [shape[d] for d in kept] != [n for n in x.shape if n != 1]:
        raise NotThis
    at = {d: i for i, d in enumerate(sorted(kept))}
    old, new = (at[d] for d in kept), itertools.count(len(kept))
    order = [next(new) if n == 1 else next(old) for n in x.shape]
    return build.reshape(base, [*(shape[d] for d in sorted(kept)), *[1] * (len(order) - len(kept))]), order


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
