"""States that a step keeps in one tensor: ``h.mul_(a).add_(x)``, ``h += x``, ``w.copy_(...)``, ``h[:, 0] = x``.

What a step leaves in the tensor is what the next one finds there. So its content is a carry, and after the loop the
last content is copied into the tensor. If a step puts another tensor in its place (``h[done] = 0; h = a * h + x``),
what it leaves in the old one is not used again, and is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from ..ir.fx import SCATTERS, add_argument
from .read_back import Origin

aten = torch.ops.aten


def keep(
    graph: Graph, operands: Sequence[Node], carried: int, others: range, results: list[Any]
) -> tuple[list[tuple[Node, Node, Origin]], list[int], list[int]]:
    """Turn tensors that a step changes as a whole into carries, in place.

    Args:
        graph: A step, functional, with ``copy_`` where it changes a placeholder.
        operands: The placeholders of the loop's operands.
        carried: How many of them the loop carries already.
        others: Which of them are the same tensor at every step.
        results: What the step returns.

    Returns:
        For each new carry its placeholder, its new value and where it begins; which of the loop's own carries are
        changed in place; and which are changed in place before another tensor takes their place.
    """
    added, changed, left = list[tuple[Node, Node, Origin]](), list[int](), list[int]()
    for copy in graph.find_nodes(op="call_function", target=aten.copy_.default):
        tensor, new = copy.args
        index = operands.index(tensor) if tensor in operands else -1
        if index < 0 or not isinstance(new, Node) or _moves(new):
            continue
        if index < carried and results[index] is new:
            changed.append(index)
        elif index < carried:
            left.append(index)
        elif index in others:
            with graph.inserting_after(tensor):
                state = add_argument(graph, f"{tensor.name}_state")
            state.meta = dict(tensor.meta)
            tensor.replace_all_uses_with(state, delete_user_cb=lambda user, copy=copy: user is not copy)
            added.append((state, new, Origin(index)))
        else:
            continue
        graph.erase_node(copy)
    return added, changed, left


def _moves(new: Any) -> bool:
    """Tell whether a step writes to positions of a tensor that its number decides on."""
    while new.target in SCATTERS:
        if any(isinstance(x, Node) for x in new.args[3:]):
            return True
        new = new.args[0]
    return False
