"""PyTorch's ``scan`` operation as a captured loop.

The operation takes a function of a state and one item of each sequence, as a graph of its own. That is what the capture
makes of a Python loop, so the same search finds the same scans in it, and the same checks compare them with its steps.
An operation whose function is no scan stays as it is: an unrolled loop would take as long to compile as it has steps.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..inductor import duplicate
from ..ir.captured_loop import CapturedLoop, Reads
from ..ir.fx import known, loop_operation
from ..ir.source import name_of
from ..recurrence.vectorize import NotALoop


def scans_as_loops(gm: GraphModule, notes: list[str]) -> GraphModule:
    """Replace each ``scan`` operation that is a scan of refold's by a captured loop.

    Args:
        gm: A Dynamo graph; not changed.
        notes: Gets why an operation stays as it is.

    Returns:
        The graph with the loops; the graph itself if there is nothing to replace.
    """
    for name in [node.name for node in gm.graph.nodes if loop_operation(node) == "scan"]:
        from .to_scan import find_scan

        twin = duplicate(gm)
        call = _looped(twin, next(node for node in twin.graph.nodes if node.name == name))
        if call is None:
            continue
        try:
            find_scan(twin, call)
        except NotALoop as reason:
            notes.append(f"a scan operation stays as it is: {reason.advice}")
            continue
        gm = twin
    return gm


def _looped(gm: GraphModule, node: Any) -> Node | None:
    """Put a loop in the place of an operation, and return its call; None if it has no such form."""
    combine, init, xs, more = node.args
    step: Any = gm.get_submodule(str(combine.target))
    made = node.meta["example_value"]
    count = known(xs[0].meta["example_value"].shape[0])
    if not isinstance(count, int) or any(x.op in ("get_attr", "call_module") for x in step.graph.nodes):
        return None
    if any(user.target is not operator.getitem for user in node.users):
        return None
    body = _body(step, len(init))
    loop = CapturedLoop(body, count, [name_of(x) for x in init], 0, [Reads(0, 1)] * len(xs))
    name = f"{node.name}_loop"
    gm.add_submodule(name, loop)
    with gm.graph.inserting_before(node):
        call = gm.graph.call_module(name, (*init, *xs, *more))
    items = [list(y.unbind(0)) for y in made[len(init) :]]
    call.meta = {**node.meta, "example_value": (*made[: len(init)], *items)}
    for user in list(node.users):
        at = user.args[1]
        with gm.graph.inserting_before(user):
            part = gm.graph.call_function(operator.getitem, (call, at))
            part.meta = {**user.meta, "example_value": call.meta["example_value"][at]}
            if at >= len(init):
                part = gm.graph.call_function(torch.stack, (part,))
                part.meta = dict(user.meta)
        user.replace_all_uses_with(part)
        gm.graph.erase_node(user)
    gm.graph.erase_node(node)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return call


def _body(step: GraphModule, carried: int) -> GraphModule:
    """Return the function of a step with the number of the step as an argument after the carried values."""
    graph, copies = Graph(), dict[Node, Node]()
    for i, node in enumerate(step.graph.nodes):
        if i == carried:
            graph.placeholder("step")
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return GraphModule(step, graph)
