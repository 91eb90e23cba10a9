"""A graph that runs eagerly, made to cost no more than the user's own code.

The capture reads ``x[:, t]`` as item t and then all of it, and keeps arithmetic on step numbers of which nothing is
used: both are left out. If nothing in the graph is changed in place, the items of a tensor that has one for each step
are taken before the loop, by one call in place of one per step. A checkpointed part is called as it is, where PyTorch
would interpret it node by node.
"""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import checkpoint

from ..ir.captured_loop import CapturedLoop, captured_loops, is_checkpoint, parts
from ..ir.fx import add_argument, same, take_place
from .mutation import changed_in_place

_ON_NUMBERS = (operator.add, operator.sub, operator.mul, operator.neg)


def run_as_written(gm: GraphModule) -> GraphModule:
    """Return a graph, to be run eagerly, whose loops take no more operations per step than the user's own.

    Args:
        gm: A Dynamo graph; not changed.
    """
    if not captured_loops(gm) and len(parts(gm)) == 1:
        return gm
    twin = GraphModule(gm, copy.deepcopy(gm.graph))
    still = not changed_in_place(twin)
    for node in list(twin.graph.nodes):
        if is_checkpoint(node) and not _context(twin, node):
            name = str(node.args[0].target)
            twin.set_submodule(name, run_as_written(twin.get_submodule(name)))  # type: ignore[arg-type]
            node.target = _checkpointed
    for call in captured_loops(twin):
        given: Any = twin.get_submodule(str(call.target))
        loop = copy.copy(given)
        loop._modules = {"body": GraphModule(given.body, copy.deepcopy(given.body.graph))}
        _shorten(loop.body)
        if still and not changed_in_place(loop.body, cautious=True) and not _returns_views(loop.body):
            _take_items(loop, call)
        loop.body.recompile()
        twin.set_submodule(str(call.target), loop)
    twin.recompile()
    return twin


def _context(gm: GraphModule, call: Any) -> bool:
    """Tell whether a checkpoint has a context of its own, which decides what is kept."""
    return "_checkpoint_context_fn" in getattr(gm.get_submodule(str(call.args[0].target)), "meta", {})


def _checkpointed(part: GraphModule, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(part.forward, *args, **{**kwargs, "use_reentrant": False})


def _shorten(body: GraphModule) -> None:
    """Leave out what the capture added to a body."""
    for node in reversed(body.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _ON_NUMBERS and not node.users and not any(map(_may_be_tensor, node.all_input_nodes)):
            body.graph.erase_node(node)
        elif node.target is operator.getitem and _is_all(*node.args):
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
            body.graph.erase_node(node)


def _returns_views(body: GraphModule) -> bool:
    """Tell whether a step returns parts of tensors; what `unbind` returns may not be changed in place."""
    made = [node.meta.get("example_value") for node in body.graph.output_node().all_input_nodes]
    return any(isinstance(x, torch.Tensor) and x._is_view() for x in made)


def _take_items(loop: CapturedLoop, call: Node) -> None:
    """Let a body read the items of a tensor of the caller's from a tuple of all of them."""
    body, outer = loop.body.graph, call.graph
    given = body.find_nodes(op="placeholder")
    first = loop.carried + 1 + len(loop.reads)  # after the state, the number of the step, and items of sequences
    operands = dict(zip(given[first:], call.args[loop.carried + len(loop.reads) :], strict=False))
    taken: dict[tuple[Node, int], tuple[Node, Node]] = {}
    for node in list(body.nodes):
        if node.target is not torch.select or node.kwargs or node.args[0] not in operands:
            continue
        x, dim, at = node.args
        if not isinstance(dim, int) or not isinstance(at, Node):
            continue  # the same item at all steps
        if not same(_steps(loop, call), operands[x].meta["example_value"].shape[dim]):
            continue  # more items than steps would be taken
        if (x, dim) not in taken:
            with outer.inserting_before(call):
                items = outer.call_method("unbind", (operands[x], dim))
            with body.inserting_after(given[-1]):
                taken[x, dim] = items, add_argument(body, "items")
            given.append(taken[x, dim][1])
        with body.inserting_before(node):
            item = body.call_function(operator.getitem, (taken[x, dim][1], at))
        take_place(item, node)
    rest = () if loop.count is not None else (call.args[-1],)
    own = call.args[: len(call.args) - len(rest)]
    call.args = (*own, *(items for items, _ in taken.values()), *rest)


def _steps(loop: CapturedLoop, call: Node) -> Any:
    return call.args[-1].meta["example_value"] if loop.count is None else loop.count  # type: ignore[union-attr]


def _may_be_tensor(node: Node) -> bool:
    return not isinstance(node.meta.get("example_value"), (int, torch.SymInt))


def _is_all(x: Any, index: Any) -> bool:
    """Tell whether an index takes all of a tensor that an operation has just read."""
    read = isinstance(x, Node) and x.target is torch.select and len(x.users) == 1
    return read and all(i in (Ellipsis, slice(None)) for i in (index if isinstance(index, tuple) else (index,)))
