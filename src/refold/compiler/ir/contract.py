"""Matrix products from operands whose axes are symbols: multiply, and sum over the axes that no later node reads.

Shapes. Operands have one axis per symbol, in any order. Two of them are multiplied as (batch, rows, summed) and
(batch, summed, columns).
"""

from __future__ import annotations

import math

import torch
from torch.fx import Node

from .builder import Builder, Operand, multiply
from .symbols import Axis

aten = torch.ops.aten


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


def _matrix(build: Builder, x: Operand, *groups: list[Axis]) -> Node:
    """Merge axes into (batch,) rows and columns."""
    order = [x.axes.index(axis) for group in groups for axis in group]
    groups = groups if groups[0] else groups[1:]
    return build.reshape(build.permute(x.node, order), [math.prod(axis.size for axis in group) for group in groups])
