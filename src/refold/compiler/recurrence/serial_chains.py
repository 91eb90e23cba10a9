"""Find serial loops in an unrolled graph: the same line of code, each time fed by the time before."""

from __future__ import annotations

from collections import Counter, defaultdict

from torch.fx import Graph, Node

from ..ir.builder import walk
from ..ir.source import source_line
from ..ir.views import is_view
from .joins import nearest

# Shorter chains are ordinary layer code.
SHORTEST = 8
# Shorter loops over time are left without a word.
SHORTEST_IN_TIME = 4
# How many nodes of a step are looked at for the step before it.
_STEP_NODES = 256


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


def steps_in_time(graph: Graph) -> bool:
    """Tell whether a line of code is a chain of steps in time: of `SHORTEST_IN_TIME` or more, and no layers."""
    for nodes in _groups(graph).values():
        members, chain = set(nodes), nodes[-1:]
        while len(chain) < SHORTEST and (before := nearest(chain[-1], members, _STEP_NODES)) is not None:
            chain.append(before)
        if len(chain) >= SHORTEST_IN_TIME and not _are_layers(chain):
            return True
    return False


def _are_layers(steps: list[Node]) -> bool:
    """Tell whether each of several nodes reads an input of the graph that is its own, as layers read parameters."""
    read, among = list[set[Node]](), set(steps)
    for step in steps:
        seen = walk(step.all_input_nodes, lambda x: () if x in among else x.all_input_nodes)
        read.append({node for node in seen if node.op in ("placeholder", "get_attr")})
    counts = Counter(node for some in read for node in some)
    return all(any(counts[node] == 1 for node in some) for some in read)


def _chains(graph: Graph) -> dict[str, tuple[int, int]]:
    """Find the lines of chains: how many operations are one after another, and how many there are."""
    found: dict[str, tuple[int, int]] = {}
    for line, nodes in _groups(graph).items():
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
            steps, launches = found.get(line[0], (longest, 0))
            found[line[0]] = (min(steps, longest), launches + len(nodes))
    return found


def _groups(graph: Graph) -> dict[tuple[str, str], list[Node]]:
    """Return the operations of one line and kind.

    Views do not count: one line can well be rewritten to many of them, one after another.
    """
    groups: dict[tuple[str, str], list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.op == "call_function" and not is_view(node) and (line := source_line(node)):
            groups[line, str(node.target)].append(node)
    return groups
