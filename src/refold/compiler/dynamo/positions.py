"""Positions of a tensor that move evenly with the number of the step."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ..ir.fx import arg, value
from .induction_variable import InductionVariable


def slice_of(node: Any, at: int, single: bool, number: InductionVariable) -> tuple[int, int, int] | None:
    """Read the positions of a slice as (start, step, width); None if they do not move evenly with the step."""
    size = value(node.args[0]).shape[arg(node, at - 1 if at == 3 else 1, "dim", 0)]
    first = _at(arg(node, at, "index" if single else "start", 0), size, number)
    if first is None:
        return None
    if single:
        return first[1], first[0], 1
    last = _at(arg(node, at + 1, "end", size), size, number)
    if last is None or last[0] != first[0] or arg(node, at + 2, "step", 1) != 1:
        return None
    return first[1], first[0], last[1] - first[1]


def _at(x: Any, size: int, number: InductionVariable) -> tuple[int, int] | None:
    if x is None:
        return 0, 0
    found = number.affine(x.meta["val"] if isinstance(x, Node) else x)
    if found is None:
        return None
    return (found[0], found[1] + size) if found[1] < 0 else found
