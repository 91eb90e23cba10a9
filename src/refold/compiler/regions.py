"""The regions of a layer in index notation: what a proposer is shown, and what its programs replace."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from ..report import GraphReport
from .compile_time import RIVAL_S, unrolled_seconds
from .dynamo import captures_loops
from .inductor import Compiled, show_graph
from .ir.builder import between
from .ir.cost import Cost, graph_cost, nbytes
from .ir.source import plain_name, source_line
from .notation.program import Equations, Read
from .notation.read import read
from .session import describe_captured


@dataclass(frozen=True)
class Region:
    """One region.

    Attributes:
        name: The name of its result.
        line: The user's line that ends it.
        program: What it computes.
        cost: FLOPs and bytes when it runs node by node.
        least_bytes: Bytes of its inputs and its result: what any program for it moves.
    """

    name: str
    line: str
    program: Equations
    cost: Cost
    least_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return the form in JSON."""
        return {
            "name": self.name,
            "line": self.line,
            "program": self.program.to_dict(),
            "flops": self.cost.flops,
            "bytes": self.cost.bytes,
            "least_bytes": self.least_bytes,
        }


def regions(module: Callable[..., Any], inputs: Sequence[Any]) -> tuple[list[Region], float]:
    """Return the regions of a module's graphs; the module runs once, on these inputs.

    Values get the names of the user's parameters and arguments where these are known. Loops that are scans are left
    out; a graph with a loop that is none is not looked into, if Inductor would take long for it.

    Returns:
        The regions, and the seconds that Inductor would take for loops as they are.
    """
    found: list[Region] = []
    estimates = [0.0]

    @captures_loops
    def look(gm: GraphModule, given: Sequence[Any]) -> Compiled:
        names = [plain_name(node.name) for node in gm.graph.find_nodes(op="placeholder")]
        estimates.append(unrolled_seconds(gm, "inference"))
        rest, _ = describe_captured(gm, GraphReport(index=0))
        if unrolled_seconds(rest, "inference") > RIVAL_S:
            return gm

        show_graph(rest, given, lambda graph: found.extend(_of_graph(graph, names)))
        return gm

    torch.compile(module, backend=look, dynamic=False)(*inputs)
    return found, sum(estimates)


def _of_graph(graph: Graph, names: Sequence[str]) -> list[Region]:
    reading = read(graph)
    placeholders = [node.name for node in graph.find_nodes(op="placeholder")]
    known = dict(zip(placeholders, names, strict=True)) if len(placeholders) == len(names) else {}
    found = []
    for root in reading.roots():
        program = reading.region(root)
        if program is None or not program.inputs:
            continue
        nodes = [reading.nodes[name] for name in program.inputs]
        inside = between(root, nodes)
        cost = graph_cost([*inside, root])
        least = sum(nbytes(node.meta["val"]) for node in (*nodes, root))
        found.append(Region(root.name, source_line(root), renamed(program, known), cost, least))
    return found


def renamed(program: Equations, names: dict[str, str]) -> Equations:
    """Give values other names, where these are free."""
    taken = {*program.inputs, *program.defined()}
    chosen: dict[str, str] = {}
    for old in program.inputs:
        new = names.get(old, old)
        if new not in taken and re.fullmatch(r"[A-Za-z_]\w{0,40}", new):
            chosen[old] = new
            taken.add(new)

    def called(x: Any) -> Any:
        return replace(x, name=chosen.get(x.name, x.name)) if isinstance(x, Read) else x

    steps = tuple(replace(step, of=tuple(map(called, step.of))) for step in program.steps)
    inputs = {chosen.get(k, k): v for k, v in program.inputs.items()}
    dtypes = {chosen.get(k, k): v for k, v in program.dtypes.items()}
    return replace(program, inputs=inputs, steps=steps, dtypes=dtypes)
