"""Tensors of a step whose size grows with its number: only what a step takes of them is computed.

Code for positions often computes all of them up to the step's, and takes the last (xPos, Sun et al. 2022,
arXiv:2212.10554): ``f(torch.arange(t + 1))[-1:]``. A slice of an elementwise function is the function of a slice, and a
slice of numbers in order are numbers in order, from another one on. So slices move up until nothing grows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from ..ir.builder import Builder
from ..ir.fx import is_tensor, value
from ..ir.moves import NotThis, emit, read
from ..ir.sinking import part
from .induction_variable import depends_on_iteration

aten = torch.ops.aten

_ORDERED = (aten.arange.default, aten.arange.start, aten.arange.start_step)
_FILLED = (aten.full.default, aten.zeros.default, aten.ones.default)


def take_parts(graph: Graph) -> None:
    """Let the slices of a traced body that do not grow be computed of tensors that do not, in place."""
    for node in list(graph.nodes):
        if not is_tensor(node) or node.op != "call_function" or _grows(value(node).shape):
            continue
        build = Builder(node)
        try:
            new = _taken(build, node)
        except NotThis:
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
    # What is decided on the step's number is decided as it is for the step that is traced.
    found = read(node, holds=bool) if node.target in (aten.slice.Tensor, aten.select.int) else None
    if found is None:
        return None
    cut: Any = [*found.chain()][-1]
    if not _grows([cut.given[cut.dim]]):
        return None
    if cut.step != 1:
        raise NotThis
    new = part(build, cut.of[0], cut.dim, cut.start, cut.shape[cut.dim], functools.partial(_made, build), bool)
    return new if cut is found else emit(build, found, new)


def _made(build: Builder, x: Any, dim: int, start: Any, length: Any) -> Node | None:
    """Return positions of an axis of what does not grow, or is filled; None for what grows otherwise."""
    shape = value(x).shape
    if not _grows(shape):
        return build.call(aten.slice.Tensor, x, dim, start, start + length)
    if x.op != "call_function" or _grows(shape[:dim] + shape[dim + 1 :]):
        raise NotThis
    if x.target in _ORDERED:
        return _numbers(build, x, start, length)
    if x.target in _FILLED:
        return build.call(
            x.target, [length if d == dim else size for d, size in enumerate(shape)], *x.args[1:], **x.kwargs
        )
    return None


def _numbers(build: Builder, x: Any, start: Any, length: int) -> Node:
    """Return numbers in order from another one on: those from zero on, and the first added."""
    given = [y.meta["val"] if isinstance(y, Node) else y for y in x.args]
    first, step = (0, 1) if len(given) == 1 else (given[0], given[2] if len(given) > 2 else 1)
    if not isinstance(step, int) or not isinstance(first, (int, torch.SymInt)):
        raise NotThis
    kinds = {"dtype": value(x).dtype, "device": value(x).device}
    numbers = build.call(aten.arange.start_step, 0, step * length, step, **kinds)
    return build.call(aten.add.Tensor, numbers, first + step * start)
