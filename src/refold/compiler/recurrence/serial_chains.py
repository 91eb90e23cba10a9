"""Find serial loops in an unrolled graph: the same line of code, each time fed by the time before."""

from __future__ import annotations

from collections import defaultdict

from torch.fx import Graph, Node

from ..ir.source import source_line
from ..ir.views import is_view

# Shorter chains are ordinary layer code.
SHORTEST = 8


def serial_loops(graph: Graph) -> list[str]:
    """Describe chains of at least `SHORTEST` operations from one source line that depend on one another.

    Returns:
        One sentence a loop: the line, the trip count, and what a step costs in launches.
    """
    return [
        f"{line} ({steps} steps one after another, {launches // steps} operations per step)"
        for line, (steps, launches) in _chains(graph).items()
    ]


def unrolled_operations(graph: Graph) -> int:
    """Return how many operations the lines of such chains compute, if their steps are steps in time.

    Layers are chains of one line, too, but each has parameters of its own: then there are more inputs than steps.
    """
    inputs = len(graph.find_nodes(op="placeholder"))
    chains = {line for line, (steps, _) in _chains(graph).items() if steps > inputs}
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    return sum(source_line(node) in chains for node in nodes) if chains else 0


def _chains(graph: Graph) -> dict[str, tuple[int, int]]:
    """Find the lines of chains: how many operations are one after another, and how many there are.

    Views do not count: one line can well be rewritten to many of them, one after another.
    """
    groups: dict[tuple[str, str], list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.op == "call_function" and not is_view(node) and (line := source_line(node)):
            groups[line, str(node.target)].append(node)
    found: dict[str, tuple[int, int]] = {}
    for (line, _), nodes in groups.items():
        if len(nodes) < SHORTEST:
            continue
        members = set(nodes)
        depth: dict[Node, int] = {}
        for node in graph.nodes:
            reached = max((depth.get(arg, 0) for arg in node.all_input_nodes), default=0)
            depth[node] = reached + (node in members)
        longest = max(depth[node] for node in nodes)
        if longest >= SHORTEST:
            # An operation may stand in one step several times, one after another: the shortest chain has it once.
            steps, launches = found.get(line, (longest, 0))
            found[line] = (min(steps, longest), launches + len(nodes))
    return found
