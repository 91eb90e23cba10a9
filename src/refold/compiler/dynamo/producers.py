"""What a loop reads, as far as it was formed element by element before the loop.

Many layers prepare the decays and inputs of all steps at once, ``dA = exp(dt[..., None] * A)``, and only then loop. An
operator that does not write the states wants the factors, which are smaller than what they were multiplied to. So the
elementwise operations, views and constants before a captured loop become part of what is rewritten. This happens
before autograd, so that the operator brings its own backward; after it, the backward of what was prepared would have
to be recognised as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._functorch.compile_utils import fx_graph_cse
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node

from ..ir.fx import is_random
from ..ir.metadata import twin
from ..private import schema
from .mutation import storages
from .one_call import CONSTANTS, run_alone
from .to_aten import to_aten

aten = torch.ops.aten

# How many operations are looked at: what prepares a loop is short.
MOST = 64
_COPIES = (aten.clone, aten._to_copy, aten._unsafe_view, aten._reshape_alias)


def elementwise_producers(operands: Sequence[Node], changed: set[Any]) -> set[Node]:
    """Return the nodes of a Dynamo graph that form a loop's operands element by element.

    Args:
        operands: What the loop reads.
        changed: Storages that the graph changes in place: what is in them depends on when it is read.
    """
    found: set[Node] = set()
    stack = list(operands)
    while stack and len(found) < MOST:
        node = stack.pop()
        if node not in found and _is_elementwise(node, changed):
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def _is_elementwise(node: Node, changed: set[Any]) -> bool:
    example: Any = node.meta.get("example_value")
    if type(example) is not torch._subclasses.FakeTensor or (ran := run_alone(node)) is None:
        return False
    if any(storages(x) & changed for x in (node, *node.all_input_nodes)):
        return False
    out, seen, read = ran
    if example.requires_grad != any(x.meta["example_value"].requires_grad for x in read):
        return False  # detached, or without gradients
    return (
        isinstance(out, torch.Tensor)
        and (out.shape, out.stride(), out.dtype) == (example.shape, example.stride(), example.dtype)
        and all(_is_plain(func) for func in seen)
    )


def _is_plain(func: Any) -> bool:
    if schema(func).is_mutable or is_random(func):
        return False
    if func.overloadpacket is aten.lift_fresh:  # a constant tensor, whose values are not in the graph
        return False
    return torch.Tag.pointwise in func.tags or func.is_view or func.overloadpacket in (*CONSTANTS, *_COPIES)


def trace_producers(operands: Sequence[Node], nodes: set[Node], mode: FakeTensorMode) -> tuple[list[Node], GraphModule]:
    """Trace what forms a loop's operands to ATen.

    Args:
        operands: What the loop reads.
        nodes: What `elementwise_producers` found.
        mode: Where its fake values live.

    Returns:
        The nodes it starts from, and a function of them that returns the operands.
    """
    graph, copies = Graph(), dict[Node, Node]()
    inputs: list[Node] = []
    for node in operands[0].graph.nodes:
        if node in nodes:
            copies[node] = graph.node_copy(node, lambda x: copies[x])
        elif node in operands or any(user in nodes for user in node.users):
            inputs.append(node)
            copies[node] = graph.placeholder(node.name)
    graph.output(tuple(copies[x] for x in operands))
    with mode:
        fakes = [twin(x.meta["example_value"]) for x in inputs]
    module = to_aten(mode, Interpreter(GraphModule({}, graph)).run, *fakes)
    # A step size that is computed twice is the decay's and the input's all the same.
    return inputs, GraphModule(module, fx_graph_cse(module.graph))
