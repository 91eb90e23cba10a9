"""A captured loop as it was, to compare its rewrite with."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..ir.builder import placeholders
from ..ir.cost import Cost, graph_cost
from ..ir.evaluate import computing_in
from ..ir.fx import value
from ..ir.rewrite import Rewrite, canonical, digest

aten = torch.ops.aten


class SequentialLoop(torch.nn.Module):
    """What forms a loop's operands, then the loop step by step, of tensors: lists of values are stacked."""

    def __init__(
        self, prologue: GraphModule, body: GraphModule, count: int, carried: int, wanted: Sequence[int], lists: int
    ) -> None:
        super().__init__()
        self.prologue, self.body, self.count, self.carried = prologue, body, count, carried
        self.wanted, self.lists = tuple(wanted), lists
        self._others: dict[torch.dtype | None, tuple[GraphModule, GraphModule]] = {}

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run all steps; return the results that are wanted: last values, and stacks of all steps' values."""
        return self._run(self.prologue, self.body, inputs)

    @cached_property
    def _by_rows(self) -> tuple[GraphModule, list[tuple[int, int]]]:
        """The body with further arguments: operands that it reads one position of, cut into all positions of that axis.

        The gradient of one read is as long as the operand, so a backward would take the square of the steps. Also of
        which operand each further argument is made, and along which axis.
        """
        graph = copy.deepcopy(self.body.graph)
        _, *operands = graph.find_nodes(op="placeholder")
        cut: dict[tuple[int, int], Node] = {}
        for node in list(graph.nodes):
            if node.target not in (aten.select.int, aten.slice.Tensor) or len(node.args) < 3:
                continue
            (x, axis, at), one = node.args[:3], node.target is aten.select.int
            if x not in operands[self.carried :] or at is None or not (one or value(node).shape[axis] == 1):
                continue
            key = operands.index(x), axis
            if key not in cut:
                with graph.inserting_after([*operands, *cut.values()][-1]):
                    cut[key] = graph.placeholder(f"rows_{len(cut)}")
            with graph.inserting_before(node):
                row = graph.call_function(operator.getitem, (cut[key], at))
                node.replace_all_uses_with(row if one else graph.call_function(aten.unsqueeze.default, (row, axis)))
            graph.erase_node(node)
        return GraphModule(self.body, graph), list(cut)

    def in_dtype(self, dtype: torch.dtype | None, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Do the same in another dtype, see `refold.compiler.ir.evaluate`, with backwards that are faster."""
        body, cut = self._by_rows
        if dtype not in self._others:
            parts = self.prologue, body
            first, steps = parts if dtype is None else (computing_in(part, dtype) for part in parts)
            self._others[dtype] = first, steps
        return self._run(*self._others[dtype], inputs, cut)

    def _run(
        self, prologue: Callable[..., Any], body: Callable[..., Any], inputs: Sequence[torch.Tensor],
        cut: Sequence[tuple[int, int]] = (),
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        operands = prologue(*inputs)
        state, rest = tuple(operands[: self.carried]), operands[self.carried :]
        rest = [*rest, *(operands[i].unbind(axis) for i, axis in cut)]
        rows: list[Any] = []
        for k in range(self.count):
            out = body(k, *state, *rest)
            state = tuple(out[: self.carried])
            rows.append([out[i] for i in self.wanted if i >= self.lists])
        columns = iter([torch.stack(column) for column in zip(*rows, strict=True)])
        return tuple(out[i] if i < self.lists else next(columns) for i in self.wanted)


@dataclass(frozen=True, eq=False)
class LoopRewrite(Rewrite):
    """The rewrite of a captured loop: its cost and its size are those of all its steps."""

    steps: SequentialLoop | None = None

    @cached_property
    def before(self) -> Cost:
        """FLOPs and bytes of all steps."""
        assert self.steps is not None
        first, one = graph_cost(self.steps.prologue.graph.nodes), graph_cost(self.steps.body.graph.nodes)
        return first + Cost(one.flops * self.steps.count, one.bytes * self.steps.count, one.largest)

    @cached_property
    def size(self) -> int:
        """Number of nodes of the loop when it is unrolled."""
        assert self.steps is not None
        return len(self.steps.body.graph.nodes) * self.steps.count

    @cached_property
    def signature(self) -> str:
        """A digest of the body, the number of steps and the candidate."""
        assert self.steps is not None
        steps = self.steps
        bodies = canonical(steps.prologue), canonical(steps.body)
        return digest(self.candidate, *bodies, steps.count, steps.wanted, self.differentiated)


def calling(steps: SequentialLoop, like: Graph) -> GraphModule:
    """Return a graph that only calls the loop as it was; it takes what another graph takes."""
    graph = Graph()
    operands = placeholders(graph, like.find_nodes(op="placeholder"))
    graph.output(graph.call_module("steps", tuple(operands.values())))
    root = torch.nn.Module()
    root.steps = steps
    return GraphModule(root, graph)
