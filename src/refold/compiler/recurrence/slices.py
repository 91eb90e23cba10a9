"""Take slices as early as possible: a part of a product is the product of parts.

A loop whose first or last step differs reads only a part of what was prepared for all steps. What
such a part is made of shows once the slice has moved below the arithmetic.

Shapes. All that is sliced is (t, ...), and slices are along axis 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ..ir.builder import Builder
from ..ir.fx import arg, is_tensor, same, value
from .vectorize import is_pointwise

aten = torch.ops.aten

_COPIES = (aten.alias.default, aten.clone.default, aten.detach.default)
_MOVES = (aten.permute.default, aten.unsqueeze.default, aten.expand.default, aten.view.default)


def sliced_early(emit: Builder, node: Any) -> Any:
    """Return an equal value whose slices are taken of the operands of views and elementwise operations."""
    if not (isinstance(node, Node) and node.op == "call_function" and is_tensor(node)):
        return node
    if node.target is aten.slice.Tensor and (cut := _cut(node)) is not None:
        return _part(emit, sliced_early(emit, arg(node, 0)), *cut)
    if node.target in (*_COPIES, *_MOVES, aten.mul.Tensor):
        args = [sliced_early(emit, x) for x in node.args]
        if any(new is not old for new, old in zip(args, node.args, strict=True)):
            if node.target is aten.view.default:
                return emit.reshape(args[0], list(value(node).shape))
            return emit.call(node.target, *args, **node.kwargs)
    return node


def _cut(node: Node) -> tuple[int, int, int] | None:
    """Read a slice as (axis, start, stop)."""
    shape = value(arg(node, 0)).shape
    dim = arg(node, 1, "dim", 0) % len(shape)
    start = arg(node, 2, "start", 0) or 0
    size = value(node).shape[dim]
    if not isinstance(start, int) or not isinstance(size, int) or arg(node, 4, "step", 1) != 1:
        return None
    if not isinstance(shape[dim], int):
        return None
    start = max(start + shape[dim], 0) if start < 0 else start
    return dim, start, start + size


def _part(emit: Builder, x: Node, dim: int, start: int, stop: int) -> Node:
    """Return positions ``start..stop`` of an axis, cut as early as possible."""
    source: Any = x.args[0] if x.op == "call_function" and x.args else None
    if x.op == "call_function" and is_pointwise(x.target) and not any(isinstance(y, Node) for y in x.kwargs.values()):
        rank = value(x).dim()
        return emit.call(x.target, *(_operand(emit, y, dim - rank, start, stop) for y in x.args), **x.kwargs)
    if x.target in _COPIES:
        return _part(emit, source, dim, start, stop)
    if x.target is aten.permute.default:
        order: Any = x.args[1]
        return emit.permute(_part(emit, source, order[dim] % len(order), start, stop), order)
    if x.target is aten.unsqueeze.default:
        new = arg(x, 1) % value(x).dim()
        if new != dim:
            return emit.call(x.target, _part(emit, source, dim - (new < dim), start, stop), new)
    if x.target is aten.expand.default:
        shape = [*value(x).shape]
        shape[dim] = stop - start
        return emit.expand(_operand(emit, source, dim - len(shape), start, stop), shape)
    return emit.call(aten.slice.Tensor, x, dim, start, stop)


def _operand(emit: Builder, x: Any, dim: int, start: int, stop: int) -> Any:
    """Cut what is broadcast to the value; ``dim`` counts from the last axis."""
    if not is_tensor(x) or value(x).dim() < -dim or same(value(x).shape[dim], 1):
        return x
    return _part(emit, x, dim + value(x).dim(), start, stop)
