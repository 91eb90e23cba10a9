"""Put a scan where a captured loop was in Dynamo's graph."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..ir.fx import arg, take_place
from .call_site import UNBINDS, CallSite, example, unbound
from .capture.lengths import JOINS

aten = torch.ops.aten


def splice(site: CallSite, candidate: GraphModule, inputs: Sequence[Node]) -> None:
    """Put a scan where the loop was.

    Args:
        site: The loop's call; its graph is edited.
        candidate: The scan in ATen: the used results, then what is written.
        inputs: What the candidate takes.
    """
    graph, call = site.gm.graph, site.call
    copies: dict[Any, Node] = {}
    source = candidate.graph
    for placeholder, node in zip(source.find_nodes(op="placeholder"), inputs, strict=True):
        copies[placeholder] = node
    with graph.inserting_before(call):
        for node in source.nodes:
            if node.op == "call_function":
                copies[node] = graph.node_copy(node, lambda n: copies[n])
                copies[node].meta = {
                    "example_value": node.meta["val"],
                    "stack_trace": call.meta.get("stack_trace", ""),
                    "custom": node.meta.get("custom", {}),
                }
        results = [copies[node] for node in source.output_node().args[0]]  # type: ignore[union-attr]
        written = results[len(site.uses) :]
        for write, content in zip(site.traced.writes, written, strict=False):
            _write(site, write, content)
        for (operand, _), content in zip(site.traced.finals, written[len(site.traced.writes) :], strict=True):
            graph.call_function(aten.copy_.default, (site.operands[operand], content))
    for (i, use), new in zip(site.uses, results, strict=False):
        if i < site.lists:
            use.replace_all_uses_with(new)
        else:
            _replace_list(graph, use, new)
    sequences = call.all_input_nodes  # an erased node has none
    for use in list(call.users):
        graph.erase_node(use)
    graph.erase_node(call)
    _drop_items(graph, sequences)


def _write(site: CallSite, write: Any, content: Node) -> None:
    """Write all steps' values at once."""
    graph, dim = site.gm.graph, write.dim
    target = site.operands[write.operand]
    # What reads the tensor after this loop must see that it has changed.
    written, sliced = example(target), example(content).dim() > example(target).dim()
    low, high = site.bounds(write)
    if isinstance(site.count, int):
        target = graph.call_function(aten.slice.Tensor, (target, dim, low, high))
        target.meta["example_value"] = aten.slice.Tensor(written, dim, low, high)
    if write.step < 0:
        content = graph.call_function(aten.flip.default, (content, [0]))
    content = graph.call_function(torch.movedim, (content, 0, dim))
    if sliced:
        content = graph.call_function(torch.flatten, (content, dim, dim + 1))
    graph.call_function(aten.copy_.default, (target, content))


def _replace_list(graph: Graph, items: Node, stacked: Node) -> None:
    """Let what used the list of all steps' values use the stack."""
    if isinstance(items.meta["example_value"], torch.Tensor):
        with graph.inserting_before(items):
            whole = graph.call_function(aten.contiguous.default, (stacked,))
        whole.meta["example_value"] = items.meta["example_value"]
        items.replace_all_uses_with(whole)
        return
    position: dict[Node, int] = {node: node.args[1] for node in items.users if node.target is operator.getitem}  # type: ignore[misc]
    joins = {user: None for node in position for user in node.users if user.target in JOINS}
    for join in joins:
        _replace_join(graph, join, position, stacked)
    for node in list(position):
        if not node.users:
            graph.erase_node(node)
    if items.users:
        with graph.inserting_before(items):
            dense = graph.call_function(aten.contiguous.default, (stacked,))
            whole = graph.call_function(torch.unbind, (dense, 0))
        dense.meta["example_value"] = stacked.meta["example_value"].contiguous()
        whole.meta["example_value"] = items.meta["example_value"]
        items.replace_all_uses_with(whole)


def _replace_join(graph: Graph, join: Any, position: dict[Node, int], stacked: Node) -> None:
    tensors = list(arg(join, 0, "tensors"))
    dim = arg(join, 1, "dim", 0) % example(join).dim()
    new_axis = join.target is torch.stack
    parts, at = [], 0
    with graph.inserting_before(join):
        while at < len(tensors):
            run = _run_from(tensors, at, position)
            if run == 1:
                one = tensors[at]
                parts.append(graph.call_function(torch.unsqueeze, (one, dim)) if new_axis else one)
            else:
                first, last = position[tensors[at]], position[tensors[at + run - 1]]
                low, high = min(first, last), max(first, last) + 1
                x = stacked
                if high - low < example(stacked).shape[0]:
                    x = graph.call_function(aten.slice.Tensor, (stacked, 0, low, high))
                if last < first:
                    x = graph.call_function(aten.flip.default, (x, [0]))
                x = graph.call_function(torch.movedim, (x, 0, dim))
                parts.append(x if new_axis else graph.call_function(torch.flatten, (x, dim, dim + 1)))
            at += run
        if len(parts) > 1:
            new = graph.call_function(torch.cat, (parts, dim))
        else:
            new = graph.call_function(aten.contiguous.default, (parts[0],))
    take_place(new, join)


def _run_from(tensors: list[Any], at: int, position: dict[Node, int]) -> int:
    """Return how many tensors from here on are neighbours in the list of all steps, in one direction."""
    run = 1
    while at + run < len(tensors):
        a, b = (position.get(tensors[at + run - i]) for i in (1, 0))
        if (
            a is None
            or b is None
            or abs(b - a) != 1
            or (run > 1 and b - a != position[tensors[at + 1]] - position[tensors[at]])
        ):
            break
        run += 1
    return run


def _drop_items(graph: Graph, sequences: list[Node]) -> None:
    """Erase what Dynamo unpacked to iterate over; the few items that are still used are selected one by one."""
    for sequence in sequences:
        for item in list(sequence.users):
            if item.target is operator.getitem and not item.users:
                graph.erase_node(item)
        if sequence.target in UNBINDS and all(item.target is operator.getitem for item in sequence.users):
            source, dim = unbound(sequence)
            for item in list(sequence.users):
                with graph.inserting_before(item):
                    new = graph.call_function(torch.select, (source, dim, item.args[1]))
                take_place(new, item)
            graph.erase_node(sequence)
