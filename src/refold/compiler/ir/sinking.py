"""Take slices as early as possible: a part of a product is the product of parts.

A slice sinks below elementwise functions and below moves of axes. What the part is made of shows then, and what is not
in it need not be computed.

Shapes. A slice takes some positions of one axis of (..., n, ...).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from ..private import statically_known_true
from .builder import Builder
from .fx import Size, is_elementwise, is_tensor, same, value
from .moves import (
    Cat,
    Copy,
    Expand,
    Flip,
    Holds,
    Moved,
    NotThis,
    Pad,
    Permute,
    Slice,
    View,
    Write,
    emit,
    insert,
    read,
    shape_of,
)

aten = torch.ops.aten

# Makes positions of an axis of a node, (node, axis, first, how many) -> node; None where they are to sink further.
Source = Callable[[Node, int, Size, Size], Node | None]


def part(
    build: Builder, x: Node, dim: int, start: Size, length: Size, source: Source | None = None,
    holds: Holds = statically_known_true,
) -> Node:  # fmt: skip
    """Return positions of an axis, cut as early as possible.

    Args:
        build: Inserts nodes.
        x: A node.
        dim: The axis.
        start: The first position.
        length: How many there are.
        source: Makes parts where slices are to end; if there is none, they end where they sink no further.
        holds: Decides questions on sizes.

    Raises:
        NotThis: With a ``source``: slices do not sink to where it makes parts.
    """
    return _Sinking(build, source, holds).part(x, dim, start, length)


def sliced_early(build: Builder, node: Any) -> Any:
    """Return an equal value whose slices are taken of the operands of views and elementwise operations."""
    if not (isinstance(node, Node) and node.op == "call_function" and is_tensor(node)):
        return node
    found = read(node)
    if found is not None and type(found) is Slice and found.step == 1 and isinstance(found.of[0], Node):
        return part(build, sliced_early(build, found.of[0]), found.dim, found.start, found.stop - found.start)
    kept = found is not None and isinstance(found, Copy | View | Permute | Expand) and found.of == node.args[:1]
    if kept or node.target is aten.mul.Tensor:
        args = [sliced_early(build, x) for x in node.args]
        if any(new is not old for new, old in zip(args, node.args, strict=True)):
            return emit(build, found, args[0]) if found is not None else build.call(node.target, *args, **node.kwargs)
    return node


class _Sinking:
    """Sinks slices in one graph."""

    def __init__(self, build: Builder, source: Source | None, holds: Holds) -> None:
        self.build, self.source, self.holds = build, source, holds

    def part(self, x: Any, dim: int, start: Size, length: Size) -> Node:
        """Return positions of a node, or of moves of nodes."""
        if isinstance(x, Moved):
            return self._moved(x, dim, start, length)
        if self.source is not None and (found := self.source(x, dim, start, length)) is not None:
            return found
        try:
            return self._below(x, dim, start, length)
        except NotThis:
            if self.source is not None:
                raise
        return self.build.call(aten.slice.Tensor, x, dim, start, start + length)

    def _below(self, x: Any, dim: int, start: Size, length: Size) -> Node:
        if x.op != "call_function":
            raise NotThis
        if (found := read(x, self.holds)) is not None:
            return self._moved(found, dim, start, length)
        if not is_elementwise(x.target) or any(isinstance(y, Node) for y in x.kwargs.values()):
            raise NotThis
        args = (self._operand(y, dim - value(x).dim(), start, length) for y in x.args)
        return self.build.call(x.target, *args, **x.kwargs)

    def _operand(self, x: Any, dim: int, start: Size, length: Size) -> Any:
        """Cut what is broadcast to a value; ``dim`` counts from the last axis."""
        if not (is_tensor(x) or isinstance(x, Moved)):
            return x
        shape = shape_of(x)
        if len(shape) < -dim or same(shape[dim], 1):
            return insert(self.build, x, lambda node: node) if isinstance(x, Moved) else x
        return self.part(x, dim + len(shape), start, length)

    def _moved(self, x: Moved, dim: int, start: Size, length: Size) -> Node:
        shape = tuple(length if d == dim else size for d, size in enumerate(x.shape))

        def again(*given: Node) -> Node:
            return emit(self.build, replace(x, shape=shape), *given)

        match x:
            case Copy():
                return self.part(x.of[0], dim, start, length)
            case Permute():
                return again(self.part(x.of[0], x.order[dim], start, length))
            case Expand():
                return again(self._operand(x.of[0], dim - len(shape), start, length))
            case View():
                return again(self.part(x.of[0], _axis_before(x, dim), start, length))
            case Flip():
                back = x.shape[dim] - start - length if dim in x.dims else start
                return again(self.part(x.of[0], dim, back, length))
            case Write():
                raise NotThis
            case Slice() if x.dim == dim and x.step == 1:
                return self.part(x.of[0], dim, start + x.start, length)
            case Slice() | Pad() | Cat() if x.dim != dim:
                return again(*(self.part(y, dim, start, length) for y in x.of))
        raise NotThis


def _axis_before(x: Moved, dim: int) -> int:
    """Return which axis of what is viewed is this axis of the view."""
    for d, size in enumerate(x.given):
        if same(size, x.shape[dim]) and not same(size, 1) and same(math.prod(x.given[:d]), math.prod(x.shape[:dim])):
            return d
    raise NotThis
