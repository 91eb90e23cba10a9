"""A captured loop as it was, to compare its rewrite with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from ..ir.cost import Cost, graph_cost
from ..ir.evaluate import computing_in
from ..ir.rewrite import Rewrite, canonical, digest


class SequentialLoop(torch.nn.Module):
    """What forms a loop's operands, then the loop step by step, of tensors: lists of values are stacked."""

    def __init__(
        self, prologue: GraphModule, body: GraphModule, count: int, carried: int, wanted: Sequence[int], lists: int
    ) -> None:
        super().__init__()
        self.prologue, self.body, self.count, self.carried = prologue, body, count, carried
        self.wanted, self.lists = tuple(wanted), lists
        self._others: dict[torch.dtype, tuple[GraphModule, GraphModule]] = {}

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run all steps; return the results that are wanted: last values, and stacks of all steps' values."""
        return self._run(self.prologue, self.body, inputs)

    def in_dtype(self, dtype: torch.dtype, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Do the same in another dtype, see `refold.compiler.ir.evaluate`."""
        if dtype not in self._others:
            self._others[dtype] = computing_in(self.prologue, dtype), computing_in(self.body, dtype)
        return self._run(*self._others[dtype], inputs)

    def _run(
        self, prologue: Callable[..., Any], body: Callable[..., Any], inputs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        operands = prologue(*inputs)
        state, rest = tuple(operands[: self.carried]), operands[self.carried :]
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
    operands = []
    for node in like.find_nodes(op="placeholder"):
        operands.append(graph.placeholder(str(node.target)))
        operands[-1].meta = dict(node.meta)
    graph.output(graph.call_module("steps", tuple(operands)))
    root = torch.nn.Module()
    root.steps = steps
    return GraphModule(root, graph)
