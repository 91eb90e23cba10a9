"""Which tensors a Dynamo graph changes in place: what is in them depends on when they are read."""

from __future__ import annotations

import inspect
import operator
from typing import Any

import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.fx import GraphModule, Node
from torch.multiprocessing.reductions import StorageWeakRef

from ..ir.captured_loop import CapturedLoop
from ..private import HigherOrderOperator, OpOverload, schema, tree_leaves
from .associative_scan import Neighbours, is_scan

_ARITHMETIC = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor")
_IN_PLACE = tuple(getattr(operator, name) for name in _ARITHMETIC)


def changed_in_place(gm: GraphModule, cautious: bool = False, but: Node | None = None) -> set[Any]:
    """Return the memory that a graph's operations write to.

    Args:
        gm: The graph.
        cautious: Count what is given to graphs inside of the graph as well, which may write to it.
        but: One of these that does not count.
    """
    return {place for place, calls in writers(gm, cautious).items() if calls != [but]}


def writers(gm: GraphModule, cautious: bool = False) -> dict[Any, list[Node]]:
    """Return the memory that a graph's operations write to, each with the calls that do; see `changed_in_place`."""
    found: dict[Any, list[Node]] = {}
    for node in gm.graph.nodes:
        inner = node.op == "call_module" or isinstance(node.target, HigherOrderOperator)
        if writes(node) or (cautious and inner):
            for place in {place for x in written(gm, node) for place in storages(x)}:
                found.setdefault(place, []).append(node)
    return found


def written(gm: GraphModule, call: Node) -> list[Node]:
    """List the arguments that a call may write to: of scans, loops and autograd functions it is known, of others all.

    A step may write to what it is handed on by the step before, which may be any other argument.
    """
    if is_autograd_function(call):
        function: Any = gm.get_submodule(str(call.args[0].target))  # type: ignore[union-attr]
        return call.all_input_nodes if _changed_inputs(function) else []
    loop = gm.get_submodule(str(call.target)) if call.op == "call_module" else None
    if is_scan(call) or isinstance(loop, Neighbours):
        return []
    if not isinstance(loop, CapturedLoop):
        return call.all_input_nodes
    changed = _changed_inputs(loop.body)
    handed_on = any(i < loop.carried for i in changed)
    return call.all_input_nodes if handed_on else [call.args[i - 1] for i in changed]  # type: ignore[misc]


def _changed_inputs(gm: GraphModule) -> list[int]:
    """Say which of its inputs a graph may write to."""
    changed = changed_in_place(gm, cautious=True)
    return [i for i, x in enumerate(gm.graph.find_nodes(op="placeholder")) if storages(x) & changed]


def is_autograd_function(node: Node) -> bool:
    """Tell whether a call is that of an autograd function of the user's own."""
    return isinstance(node.target, HigherOrderOperator) and node.target.name() == "autograd_function_apply"


def writes(node: Node) -> bool:
    """Tell whether a call changes one of its arguments."""
    if not node.op.startswith("call") or node.op == "call_module":
        return False
    name = getattr(node.target, "__name__", node.target)
    mutable = isinstance(node.target, OpOverload) and schema(node.target).is_mutable
    in_place = isinstance(name, str) and ((name.endswith("_") and not name.endswith("__")) or name == "setitem")
    return mutable or in_place or "out" in node.kwargs or node.target in _IN_PLACE or _asked_to(node)


def _asked_to(node: Node) -> bool:
    """Tell whether a function is called with ``inplace=True``, by keyword or position."""
    if node.kwargs.get("inplace") or not inspect.isfunction(node.target):
        return bool(node.kwargs.get("inplace"))
    parameters = list(inspect.signature(node.target).parameters)
    at = parameters.index("inplace") if "inplace" in parameters else len(node.args)
    return at < len(node.args) and bool(node.args[at])


def memory(x: torch.Tensor) -> Any:
    """Identify a tensor's memory: equal for two that share it, also inside of ``torch.func``'s transforms."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return StorageWeakRef(x.untyped_storage()).cdata


def storages(node: Node) -> set[Any]:
    """Return the storages of a value, and of the items of a list of values."""
    return {memory(x) for x in tree_leaves(node.meta.get("example_value")) if isinstance(x, torch.Tensor)}
