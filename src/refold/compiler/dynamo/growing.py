"""Tensors of a step whose size grows with its number: only what a step takes of them is computed.

Code for positions often computes all of them up to the step's, and takes the last (xPos, Sun et al. 2022,
arXiv:2212.10554): ``f(torch.arange(t + 1))[-1:]``. A slice of an elementwise function is the function of a slice, and a
slice of numbers in order are numbers in order, from another one on. So slices move up until nothing grows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from ..ir.builder import Builder
from ..ir.fx import arg, is_tensor, known, value
from ..recurrence.vectorize import is_pointwise
from .induction_variable import depends_on_iteration

aten = torch.ops.aten
prims = torch.ops.prims

_ELEMENTWISE = (
    prims.convert_element_type.default, aten._to_copy.default, aten.clone.default, aten.alias.default,
    aten.detach.default,
)  # fmt: skip
_ORDERED = (aten.arange.default, aten.arange.start, aten.arange.start_step)
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_FILLED = (aten.full.default, aten.zeros.default, aten.ones.default)


class _Grows(Exception):
    """A value cannot be computed in part."""


def take_parts(graph: Graph) -> None:
    """Let the slices of a traced body that do not grow be computed of tensors that do not, in place."""
    for node in list(graph.nodes):
        if not is_tensor(node) or node.op != "call_function" or _grows(value(node).shape):
            continue
        build = Builder(node)
        try:
            new = _taken(build, node)
        except _Grows:
            build.undo()
            continue
        if new is not None:
            node.replace_all_uses_with(new)
    graph.eliminate_dead_code()


def _grows(sizes: Sequence[Any]) -> bool:
    return any(isinstance(size, torch.SymInt) and depends_on_iteration(size) for size in sizes)


def _taken(build: Builder, node: Any) -> Node | None:
    """Return a slice, or numbers in order, without what grows; None if there is nothing to do."""
    if node.target in _ORDERED and any(isinstance(x, Node) for x in node.args):
        return _numbers(build, node, 0, value(node).shape[0])
    if node.target not in (aten.slice.Tensor, aten.select.int) or not _grows(value(node.args[0]).shape):
        return None
    source = node.args[0]
    dim = arg(node, 1, "dim", 0) % value(source).dim()
    size = value(source).shape[dim]
    if not _grows([size]):
        return None
    first = arg(node, 2, "start" if node.target is aten.slice.Tensor else "index", 0)
    start = first.meta["val"] if isinstance(first, Node) else first or 0
    start = start + size if start < 0 else start
    if node.target is aten.select.int:
        return build.call(aten.select.int, _part(build, source, dim, start, 1), dim, 0)
    if arg(node, 4, "step", 1) != 1:
        raise _Grows
    return _part(build, source, dim, start, known(value(node).shape[dim]))


def _part(build: Builder, x: Any, dim: int, start: Any, length: int) -> Node:
    """Return positions ``start`` to ``start + length`` of an axis."""
    rank, shape = value(x).dim(), value(x).shape
    if not _grows(shape):
        return build.call(aten.slice.Tensor, x, dim, start, start + length)
    if x.op != "call_function" or _grows(shape[:dim] + shape[dim + 1 :]):
        raise _Grows
    if is_pointwise(x.target) or x.target in _ELEMENTWISE:
        args = [_operand(build, y, dim - rank, start, length) for y in x.args]
        return build.call(x.target, *args, **x.kwargs)
    if x.target in _ORDERED:
        return _numbers(build, x, start, length)
    if x.target in _FILLED:
        sizes = [length if d == dim else size for d, size in enumerate(shape)]
        return build.call(x.target, sizes, *x.args[1:], **x.kwargs)
    source: Any = x.args[0]
    if x.target is aten.slice.Tensor and arg(x, 1, "dim", 0) % rank == dim and arg(x, 4, "step", 1) == 1:
        first = arg(x, 2, "start", 0)
        first = first.meta["val"] if isinstance(first, Node) else first or 0
        if first < 0:
            first = first + value(source).shape[dim]
        return _part(build, source, dim, start + first, length)
    if x.target is aten.unsqueeze.default:
        new = x.args[1] % rank
        return build.call(x.target, _part(build, source, dim - (new < dim), start, length), new)
    if x.target in (aten.permute.default, aten.transpose.int):
        order = list(range(rank))
        if x.target is aten.permute.default:
            order = [d % rank for d in x.args[1]]
        else:
            i, j = (d % rank for d in x.args[1:3])
            order[i], order[j] = order[j], order[i]
        return build.call(aten.permute.default, _part(build, source, order[dim], start, length), order)
    if x.target in _VIEWS:
        own = [d for d, size in enumerate(value(source).shape) if _grows([size])]
        if len(own) != 1 or math.prod(value(source).shape[: own[0]]) != math.prod(shape[:dim]):
            raise _Grows
        sizes = [length if d == dim else size for d, size in enumerate(shape)]
        return build.call(aten.reshape.default, _part(build, source, own[0], start, length), sizes)
    if x.target is aten.expand.default:
        sizes = [length if d == dim else size for d, size in enumerate(shape)]
        return build.call(x.target, _operand(build, source, dim - rank, start, length), sizes)
    raise _Grows


def _operand(build: Builder, x: Any, dim: int, start: Any, length: int) -> Any:
    """Take the part of an operand that is broadcast; ``dim`` counts from the last axis."""
    if not is_tensor(x) or value(x).dim() < -dim or known(value(x).shape[dim]) == 1:
        return x
    return _part(build, x, dim + value(x).dim(), start, length)


def _numbers(build: Builder, x: Any, start: Any, length: int) -> Node:
    """Return numbers in order from another one on: those from zero on, and the first added."""
    given = [y.meta["val"] if isinstance(y, Node) else y for y in x.args]
    first, step = (0, 1) if len(given) == 1 else (given[0], given[2] if len(given) > 2 else 1)
    if not isinstance(step, int) or not isinstance(first, (int, torch.SymInt)):
        raise _Grows
    kinds = {"dtype": value(x).dtype, "device": value(x).device}
    numbers = build.call(aten.arange.start_step, 0, step * length, step, **kinds)
    return build.call(aten.add.Tensor, numbers, first + step * start)
