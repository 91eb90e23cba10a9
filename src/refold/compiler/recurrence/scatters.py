"""Tensors that are written to position by position, as functionalisation leaves them: who reads what was written.

A step may read what the step before it wrote. In a backward, each step reads its part of a gradient. Then it clears
this part in a copy for the next step. The last state may be all that is read of a stack of all states.

Shapes. A write puts (..., width, ...) at a position of one axis of (..., size, ...); ``select_scatter`` writes (...,
...).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from ..ir.builder import Builder
from ..ir.fx import arg, is_tensor, known, place, value
from ..ir.metadata import refresh, substitute
from ..ir.moves import Write, read

aten = torch.ops.aten


def plain_copy(copy: Any) -> bool:
    """Tell whether a copy into another tensor only passes its source on."""
    source = copy.args[1]
    return is_tensor(source) and (value(source).shape, value(source).dtype) == (value(copy).shape, value(copy).dtype)


def content(scatter: Any) -> Any:
    """Find the node that a write stores, without the copy that functionalisation makes of it."""
    new = scatter.args[1]
    while isinstance(new, Node) and new.target is aten.copy.default and plain_copy(new):
        new = new.args[1]
    return new


def position(scatter: Any) -> tuple[int, int, int] | None:
    """Return (axis, start, width) of a write."""
    write = read(scatter)
    if not isinstance(write, Write) or write.step != 1:
        return None
    start, width = known(write.start), known(write.stop - write.start)
    return (write.dim, start, width) if isinstance(start, int) and isinstance(width, int) else None


def slice_writes(node: Any) -> list[Node]:
    """List the writes to slices of one tensor of which a node is the last, the first one first."""
    found = []
    while node.target is aten.slice_scatter.default:
        found.append(node)
        node = node.args[0]
    return found[::-1]


@dataclass
class _Written:
    """A tensor and the positions of one axis that a chain of writes has replaced in it."""

    base: Node
    dim: int
    count: int = 0
    # Position -> (how many writes there were, what was written), first one first.
    content: dict[int, list[tuple[int, Node]]] = field(default_factory=lambda: defaultdict(list))


def forward_writes(graph: Graph) -> None:
    """Let reads of one position of a tensor read what was written there, or the tensor as it was before.

    Not what leaves the graph: that must not share memory with anything else that does.
    """
    changed: set[Node] = set()
    # A tensor that was written to -> the chain, and how many of its writes the tensor has seen.
    seen: dict[Node, tuple[_Written, int]] = {}
    for node in list(graph.nodes):
        if node.target is aten.copy.default and plain_copy(node):
            source = node.args[1]
            seen[node] = seen.get(source) or (_Written(source, -1), 0)
        elif node.target is aten.select_scatter.default and (place := position(node)) is not None:
            chain, count = seen.get(node.args[0], (None, 0))
            if chain is None or chain.dim != place[0] or chain.count != count:
                chain = _Written(node.args[0], place[0])
            chain.count += 1
            chain.content[place[1]].append((chain.count, content(node)))
            seen[node] = chain, chain.count
        elif node.target is aten.select.int and isinstance(arg(node, 2), int):
            if node.args[0] in seen:
                _forward_read(node, seen, changed)
            else:
                _read_end(node, changed)
    refresh(graph, changed)


def _forward_read(node: Any, seen: dict[Node, tuple[_Written, int]], changed: set[Node]) -> None:
    source, shape = node.args[0], value(node.args[0]).shape
    dim = node.args[1] % len(shape)
    at = place(node.args[2], shape[dim])
    while at is not None and source in seen:
        chain, count = seen[source]
        if chain.count and chain.dim != dim:
            return
        written = [content for number, content in chain.content.get(at, ()) if number <= count]
        if written:
            if value(written[-1]).shape == value(node).shape and value(written[-1]).dtype == value(node).dtype:
                changed.update(substitute(node, written[-1], outside=False))
            return
        source = chain.base
    if at is None:
        return
    new = Builder(node).call(aten.select.int, source, dim, at)
    changed.update(substitute(node, new, outside=False))


def _read_end(node: Any, changed: set[Node]) -> None:
    """Let a read of the first or last of stacked tensors read that tensor: the others may not be needed."""
    stacked = node.args[0]
    cat = stacked.args[0] if stacked.target is aten.view.default else stacked
    if cat.target not in (aten.cat.default, aten.stack.default):
        return
    parts, whole = cat.args[0], value(stacked).shape
    shape, dim = list(value(parts[0]).shape), arg(cat, 1, "dim", 0) % value(cat).dim()
    at = place(node.args[2], whole[dim])
    if at is None or list(whole) != [*shape[:dim], len(parts), *shape[dim:]] or node.args[1] % len(whole) != dim:
        return
    if value(parts[at]).dtype != value(node).dtype:
        return
    if at in (0, len(parts) - 1) and value(parts[at]).is_contiguous():
        changed.update(substitute(node, parts[at], outside=False))
