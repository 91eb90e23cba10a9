"""SiLU as ATen writes it."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from .fx import arg

aten = torch.ops.aten


def silu_argument(node: Node) -> Node | None:
    """Return x if a node is ``x * sigmoid(x)``; None otherwise.

    It may be ``aten.silu``, a product with ``sigmoid(x)``, or what PyTorch makes of it, ``x / (1 + exp(-x))``.
    """
    if node.target is aten.silu.default:
        return arg(node, 0)
    if node.target is aten.div.Tensor:
        x, below = _operands(node)
        return x if _is_call(below, aten.add.Tensor, 1) and _is_exp_of_minus(below.args[0], x) else None
    if node.target is aten.mul.Tensor:
        for x, other in (_operands(node), _operands(node)[::-1]):
            if _is_call(other, aten.sigmoid.default) and other.args[0] is x:
                return x
    return None


def _operands(node: Node) -> tuple[Any, ...]:
    return node.args


def _is_exp_of_minus(node: Any, x: Any) -> bool:
    return _is_call(node, aten.exp.default) and _is_call(node.args[0], aten.neg.default) and node.args[0].args[0] is x


def _is_call(node: Any, target: Any, *rest: Any) -> bool:
    """Tell whether a node calls an operation with these arguments after the first."""
    return isinstance(node, Node) and node.target is target and node.args[1:] == rest and not node.kwargs
