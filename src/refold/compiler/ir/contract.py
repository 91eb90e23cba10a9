"""Nodes from operands whose axes are symbols: multiply, lay out, and sum over the axes that no later node reads.

Shapes. Operands have one axis per symbol, in any order. Two of them are multiplied as (batch, rows, summed) and
(batch, summed, columns).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import opt_einsum
import torch
from torch.fx import Node

from .builder import Builder
from .index import Factor, Product
from .symbols import Axis, atoms, resolve

aten = torch.ops.aten


@dataclass
class Operand:
    """A node whose axes are exactly ``axes``, one atomic symbol each."""

    node: Node
    axes: list[Axis]


def operand(build: Builder, factor: Factor) -> Operand:
    """Insert a factor's pending steps and give every symbol an axis of its own, whatever the factor's axes were."""
    node = factor.node
    for step in factor.pending:
        node = step(build, node)
    axes = list(factor.axes())
    return Operand(build.reshape(node, [axis.size for axis in axes]), axes)


def aligned(build: Builder, x: Operand, axes: Sequence[Axis]) -> Node:
    """Permute an operand's axes into the order of ``axes``, with an axis of size one where it has none of them."""
    node = build.permute(x.node, [x.axes.index(axis) for axis in axes if axis in x.axes])
    for dim, axis in enumerate(axes):
        if axis not in x.axes:
            node = build.call(aten.unsqueeze.default, node, dim)
    return node


def spread(build: Builder, x: Operand, axes: Sequence[Axis]) -> Node:
    """Permute an operand's axes likewise, and repeat it along those that it has not."""
    node = aligned(build, x, axes)
    if all(axis in x.axes for axis in axes):
        return node
    return build.call(aten.expand.default, node, [build.size(axis.size) for axis in axes])


def multiply(build: Builder, a: Operand, b: Operand, out: Sequence[Axis], by: Any = aten.mul.Tensor) -> Operand:
    """Multiply elementwise, broadcasting over symbols; axes in the order of ``out`` where they reach it.

    ``by`` may divide instead.
    """
    axes = sorted({*a.axes, *b.axes}, key=lambda axis: out.index(axis) if axis in out else len(out))
    return Operand(build.call(by, *(aligned(build, x, axes) for x in (a, b))), axes)


def multiplied(build: Builder, factors: Iterable[Factor], out: Sequence[Axis]) -> Operand:
    """Insert factors, and multiply them."""
    return reduce(lambda a, b: multiply(build, a, b, out), [operand(build, factor) for factor in factors])


def lay_out(build: Builder, x: Operand, product: Product) -> Node:
    """Permute, repeat and merge an operand's axes, one per symbol, into those of a product, one per label."""
    node = spread(build, x, atoms(product.labels))
    return build.reshape(node, [math.prod(axis.size for axis in resolve(label)) for label in product.labels])


def sum_out(build: Builder, x: Operand, keep: set[Axis]) -> Operand:
    """Sum over the axes that nothing else reads."""
    dims = [i for i, axis in enumerate(x.axes) if axis not in keep]
    if not dims:
        return x
    return Operand(build.call(aten.sum.dim_IntList, x.node, dims), [axis for axis in x.axes if axis in keep])


def contract(build: Builder, operands: list[Operand], keep: set[Axis], out: list[Axis]) -> Operand:
    """Multiply operands and sum over what is not kept; two at a time. The result has the kept axes, in any order."""
    *rest, last = operands
    if not rest:
        return sum_out(build, last, keep)
    a = rest[0] if len(rest) == 1 else contract(build, rest, {*keep, *last.axes}, out)
    a = sum_out(build, a, {*keep, *last.axes})
    b = sum_out(build, last, {*keep, *a.axes})
    shared = [axis for axis in a.axes if axis in b.axes]
    summed = [axis for axis in shared if axis not in keep]
    rows = [axis for axis in a.axes if axis not in b.axes]
    columns = [axis for axis in b.axes if axis not in a.axes]
    if not (summed and rows and columns):
        return sum_out(build, multiply(build, a, b, out), keep)
    batch = [axis for axis in shared if axis in keep]
    left = _matrix(build, a, batch, rows, summed)
    right = _matrix(build, b, batch, summed, columns)
    result = build.call(aten.bmm.default if batch else aten.mm.default, left, right)
    axes = [*batch, *rows, *columns]
    return Operand(build.reshape(result, [axis.size for axis in axes]), axes)


def least_work(
    factors: Sequence[Sequence[Any]], out: Iterable[Any], size: Callable[[Any], int]
) -> list[tuple[int, ...]]:
    """Order a product for least work: what is multiplied next, as positions in what is left.

    Args:
        factors: The symbols of each factor, of any type.
        out: Those of the result that a factor has.
        size: Gives the size of a symbol.
    """
    letters: dict[Any, str] = {}

    def spell(symbols: Iterable[Any]) -> str:
        return "".join(letters.setdefault(x, opt_einsum.get_symbol(len(letters))) for x in symbols)

    terms, shapes = ",".join(map(spell, factors)), [tuple(map(size, factor)) for factor in factors]
    path, _ = opt_einsum.contract_path(f"{terms}->{spell(out)}", *shapes, shapes=True)
    return list(path)


def contract_in_order(
    build: Builder, operands: list[Operand], path: Iterable[tuple[int, ...]], out: list[Axis]
) -> Operand:
    """Contract operands, those at each entry of ``path`` at a time, to one that has no axes but those of ``out``."""
    for group in path:
        chosen = [operands[i] for i in group]
        operands = [x for i, x in enumerate(operands) if i not in group]
        keep = {*out, *(axis for x in operands for axis in x.axes)}
        operands.append(contract(build, chosen, keep, out))
    (result,) = operands
    return sum_out(build, result, set(out))


def _matrix(build: Builder, x: Operand, *groups: list[Axis]) -> Node:
    """Merge axes into (batch,) rows and columns."""
    order = [x.axes.index(axis) for group in groups for axis in group]
    groups = groups if groups[0] else groups[1:]
    return build.reshape(build.permute(x.node, order), [math.prod(axis.size for axis in group) for group in groups])
