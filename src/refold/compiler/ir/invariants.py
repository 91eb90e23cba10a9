"""What holds for a graph between any two passes.

1. Nodes are in order: a node comes after its inputs (``Graph.lint``).
2. Every call has a fake value, ``node.meta["val"]``.
3. Every fake value is true: the operation, applied to the fake values of its arguments, gives the same shapes, dtypes,
   devices and strides.

A pass that breaks one of them makes Inductor generate wrong code, even if every operation of the graph is right.
"""

from __future__ import annotations

from torch.fx import Graph

from .metadata import stale


def check_invariants(graph: Graph, after: str) -> None:
    """Raise an ``AssertionError`` that names the pass and the node, if an invariant does not hold.

    Args:
        graph: An ATen graph with fake values.
        after: Name of the pass that has just run.
    """
    graph.lint()
    for node in graph.nodes:
        if node.op == "call_function" and "val" not in node.meta:
            raise AssertionError(f'after "{after}": {node.format_node()} has no fake value')
    if wrong := stale(graph):
        raise AssertionError(f'after "{after}": {wrong}')
