"""Loops that read what earlier steps wrote to a tensor: ``y[:, t] = a * y[:, t - 1] + x[:, t]``.

A step writes one position, and reads others at a fixed distance. What was written j steps ago is a carry: the content,
handed on j times. So positions become carries, and the loop no longer reads what it writes (register promotion). What
lies ahead of the write is what the tensor held before the loop.

Shapes. The tensor is (..., t, ...), a carry (..., 1, ...) or (...), as the step writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from ..ir.builder import Builder
from ..ir.fx import SCATTERS, add_argument, arg, value
from ..recurrence.scatters import plain_copy
from .induction_variable import InductionVariable
from .positions import slice_of

aten = torch.ops.aten

_READS = (aten.select.int, aten.slice.Tensor)
# A step may read this far back.
FARTHEST = 16


@dataclass(frozen=True)
class Origin:
    """What a placeholder that was added to a body holds before the first step: an operand, or a position of one.

    Attributes:
        operand: The operand's index among the loop's own.
        dim: The axis; None for all of the operand.
        at: The position.
        keep: Whether the axis stays, with size one.
        back: How many steps ago it was written, for a carry of `promote`.
    """

    operand: int
    dim: int | None = None
    at: int = 0
    keep: bool = False
    back: int = 0


@dataclass
class _Written:
    """A tensor that steps write to: its placeholder, and the writes of one step, the last one last."""

    operand: int
    tensor: Node
    scatters: list[Any]
    dim: int = 0
    first: int = 0
    step: int = 0

    @property
    def states(self) -> list[Node]:
        """What the tensor is, before and after each write of a step."""
        return [self.tensor, *self.scatters]


@dataclass
class Promoted:
    """What was added to a body: carries, each with its new value, and tensors as they were before the loop."""

    carries: list[tuple[Node, Any, Origin]]
    before: list[tuple[Node, Origin]]


def promote(graph: Graph, operands: Sequence[Node], number: InductionVariable) -> Promoted:
    """Turn reads of what steps write into carries, in place; leave alone what cannot be.

    Args:
        graph: A step, functional, with ``copy_`` where it changes a placeholder.
        operands: The placeholders of the loop's operands.
        number: The number of the step.
    """
    for node in graph.find_nodes(op="call_function", target=aten.copy.default):
        if plain_copy(node):
            node.replace_all_uses_with(node.args[1])
    graph.eliminate_dead_code()
    promoted = Promoted([], [])
    for copy in graph.find_nodes(op="call_function", target=aten.copy_.default):
        written = _written(copy, operands, number)
        if written is not None and _reads(written):
            _promote(graph, written, number, promoted)
    return promoted


def _written(copy: Any, operands: Sequence[Node], number: InductionVariable) -> _Written | None:
    """Follow a tensor through the writes of a step; None unless all are to one position that moves with the step."""
    tensor, last = copy.args
    if tensor not in operands:
        return None
    scatters: list[Any] = []
    while last is not tensor:
        if not isinstance(last, Node) or last.target not in SCATTERS:
            return None
        scatters.insert(0, last)
        last = last.args[0]  # type: ignore[assignment]
    places = {_place(scatter, 3, number) for scatter in scatters}
    if len(places) != 1 or None in places:
        return None
    ((dim, first, step, width),) = places  # type: ignore[misc]
    if width != 1 or abs(step) != 1 or not isinstance(first, int):
        return None
    return _Written(operands.index(tensor), tensor, scatters, dim, first, step)


def _place(node: Any, at: int, number: InductionVariable) -> tuple[int, int, int, int] | None:
    """Return the axis and the positions, (start, step, width), that a read or a write takes."""
    single = node.target in (aten.select.int, aten.select_scatter.default)
    dim = arg(node, at - 1, "dim", 0) % value(node.args[0]).dim()
    place = slice_of(node, at, single, number)
    return None if place is None else (dim, *place)


def _reads(written: _Written) -> list[Any]:
    users = [user for x in written.states for user in x.users]
    return [user for user in users if user not in written.scatters and user.target is not aten.copy_.default]


def _promote(graph: Graph, written: _Written, number: InductionVariable, promoted: Promoted) -> None:
    reads = _reads(written)
    places = {read: _place(read, 2, number) if read.target in _READS else None for read in reads}
    farthest = 0
    for place in places.values():
        if place is None or place[0] != written.dim or place[2] != written.step or not isinstance(place[1], int):
            return
        farthest = max(farthest, (written.first - place[1]) * written.step)
        farthest = max(farthest, (written.first - place[1] - place[3] + 1) * written.step)
    if farthest > FARTHEST:
        return
    operand, dim = written.operand, written.dim
    registers = [_placeholder(graph, f"{written.tensor.name}_back_{i}", _element(written)) for i in range(farthest)]
    contents: list[Any] = [_content(scatter) for scatter in written.scatters]
    before = _placeholder(graph, f"{written.tensor.name}_before", value(written.tensor))
    for read, place in places.items():
        _, start, _, width = place  # type: ignore[misc]
        build, level = Builder(read), written.states.index(read.args[0])  # type: ignore[arg-type]
        elements = []
        for position in range(start, start + width):
            lag = (written.first - position) * written.step
            if lag > 0:
                elements.append(registers[lag - 1])
            elif lag == 0 and level:
                elements.append(contents[level - 1])
            else:
                at = position + written.step * number.symint
                elements.append(build.call(aten.select.int, before, dim, at))
        if all(x.target is aten.select.int and x.args[0] is before for x in elements):
            build.undo()
            read.update_arg(0, before)
            continue
        if read.target is aten.select.int:
            new = elements[0]
        else:
            new = build.call(aten.cat.default, [build.call(aten.unsqueeze.default, x, dim) for x in elements], dim)
        read.replace_all_uses_with(new)
        graph.erase_node(read)
    written.scatters[-1].update_arg(0, written.tensor)
    handed = [_content(written.scatters[-1]), *registers]
    for i, register in enumerate(registers):
        at = written.first - written.step * (i + 1)
        promoted.carries.append((register, handed[i], Origin(operand, dim, at, back=i + 1)))
    if before.users:
        promoted.before.append((before, Origin(operand)))
    else:
        graph.erase_node(before)


def _element(written: _Written) -> torch.Tensor:
    tensor = value(written.tensor)
    with tensor.fake_mode:  # type: ignore[attr-defined]
        return tensor.select(written.dim, 0).clone(memory_format=torch.contiguous_format)


def _content(scatter: Any) -> Node:
    """Take the value that is written, without the axis of size one."""
    content = scatter.args[1]
    if scatter.target is aten.select_scatter.default:
        return content
    return Builder(scatter).call(aten.squeeze.dim, content, arg(scatter, 2, "dim", 0))


def _placeholder(graph: Graph, name: str, like: torch.Tensor) -> Node:
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        node = add_argument(graph, name)
    node.meta["val"] = like
    return node
