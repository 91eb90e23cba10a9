"""A loop over time as one node of Dynamo's graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.traceback import has_preserved_node_meta

from .builder import downstream
from .fx import concrete, known, same


@dataclass(frozen=True)
class Reads:
    """A step reads item ``start + step * k`` of a sequence of tensors, ``k`` counting steps from 0."""

    start: int
    step: int


class CapturedLoop(torch.nn.Module):
    """Runs a body ``count`` times: what the user's loop does, step by step.

    The body takes the carried values, the number of the step, one item of each sequence, and what is the same at every
    step. It returns the new carried values, further values of which only the last step's counts, and values that are
    collected.

    The loop is called with the first carried values, the sequences, and the rest. It returns the last carried values,
    the last further values, and for each collected value the list of all steps' values.

    Where ``count`` is None it is the last operand, and all steps' values are one tensor, (t, ...), whose first axis is
    time.
    """

    # The body may write to its arguments: no pass may drop a call of which nothing is used.
    _is_impure = True

    def __init__(
        self, body: GraphModule, count: int | None, names: Sequence[str], lasts: int, reads: Sequence[Reads]
    ) -> None:
        """Hold a body.

        Args:
            body: See above.
            count: How many steps there are; None if the last operand says.
            names: What the user calls each carried value.
            lasts: How many further values count at the last step only.
            reads: Which item of each sequence a step reads.
        """
        super().__init__()
        self.body, self.count, self.lasts, self.reads = body, count, lasts, tuple(reads)
        self.names, self.carried = tuple(names), len(names)

    def forward(self, *operands: Any) -> tuple[Any, ...]:
        """Run all steps."""
        # An interpreter tells AOTAutograd which line of the user's each operation comes from.
        return self.run(Interpreter(self.body).run if has_preserved_node_meta() else self.body.forward, operands)

    def run(self, body: Callable[..., Any], operands: Sequence[Any], most: int | None = None) -> tuple[Any, ...]:
        """Run all steps with this body, or the first ones: what the others would collect is then what the last did."""
        carried, count = self.carried, self.count
        if count is None:
            *operands, count = operands
        state, rest = tuple(operands[:carried]), operands[carried:]
        sequences, fixed = rest[: len(self.reads)], rest[len(self.reads) :]
        collected: list[tuple[Any, ...]] = []
        kept = carried + self.lasts
        for k in range(count if most is None else min(count, most)):
            items = [xs[read.start + read.step * k] for xs, read in zip(sequences, self.reads, strict=True)]
            out = body(*state, k, *items, *fixed)
            state = out[:carried]
            collected.append(out[carried:])
        columns = [list(column) for column in zip(*collected, strict=True)]
        lasts, lists = columns[: kept - carried], columns[kept - carried :]
        if most is not None:
            lists = [[*column, *column[-1:] * (count - len(column))] for column in lists]
        return (
            *state,
            *(column[-1] for column in lasts),
            *(lists if self.count is not None else map(torch.stack, lists)),
        )

    @functools.cached_property
    def takes_chunks(self) -> bool:
        """Whether a step multiplies matrices apart from its state, as one does that takes a chunk of tokens.

        An outer product, whose result has more axes or which sums over one number, is none.
        """
        graph = self.body.graph
        stateful = downstream(*graph.find_nodes(op="placeholder")[: self.carried])
        for node in graph.nodes:
            name = getattr(node.target, "__name__", node.target)
            if name not in ("matmul", "bmm", "einsum") or node in stateful:
                continue
            values = [x.meta.get("example_value") for x in (node, *node.all_input_nodes)]
            shapes = [x.shape for x in values if isinstance(x, torch.Tensor)]
            alike = len(shapes) > 2 and len({*map(len, shapes)}) == 1 and len(shapes[0]) > 2
            if alike and (name == "einsum" or not same(shapes[1][-1], 1)):
                return True
        return False


def captured_loops(gm: GraphModule) -> dict[Node, CapturedLoop]:
    """Return the captured loops of a graph by the nodes that call them, in order."""
    found = {node: gm.get_submodule(str(node.target)) for node in gm.graph.find_nodes(op="call_module")}
    return {node: loop for node, loop in found.items() if isinstance(loop, CapturedLoop)}


def parts(gm: GraphModule) -> list[tuple[str, ...]]:
    """Return the paths of a graph itself, and of the graphs in it that are computed again in the backward."""
    paths: list[tuple[str, ...]] = [()]
    for node in filter(is_checkpoint, gm.graph.nodes):
        name = str(node.args[0].target)
        inner: Any = gm.get_submodule(name)
        if len(node.args[0].users) == 1:
            paths += [(name, *path) for path in parts(inner)]
    return paths


def is_checkpoint(node: Node) -> bool:
    """Tell whether a call runs a graph that is computed again in the backward."""
    given = node.args[0] if node.args else None
    return getattr(node.target, "__name__", "") == "tag_activation_checkpoint" and isinstance(given, Node)


def unrolled_size(gm: GraphModule) -> int:
    """Return how many nodes a graph has when its loops are unrolled."""
    return len(gm.graph.nodes) + loop_nodes(gm)


def loop_nodes(gm: GraphModule) -> int:
    """Return how many nodes become of the loops of a graph, and of its parts, when they are unrolled."""
    graphs: list[Any] = [gm.get_submodule(".".join(path)) for path in parts(gm)]
    loops = [pair for part in graphs for pair in captured_loops(part).items()]
    return sum(len(loop.body.graph.nodes) * concrete(step_count(loop, node)) for node, loop in loops)


def step_count(loop: CapturedLoop, call: Node) -> Any:
    """Return how many steps a loop has: a number, or a symbol."""
    if loop.count is not None:
        return loop.count
    operand: Any = call.args[-1]
    return known(operand.meta["example_value"])
