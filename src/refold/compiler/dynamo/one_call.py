"""One call of a Dynamo graph, run alone: what it does, and which of its inputs it reads."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from ..ir.metadata import twin
from ..private import HigherOrderOperator, TorchDispatchMode, tree_leaves

aten = torch.ops.aten
CONSTANTS = (
    aten.zeros, aten.ones, aten.full, aten.zeros_like, aten.ones_like, aten.full_like, aten.new_zeros, aten.new_ones,
    aten.new_full,
)  # fmt: skip
"""What makes one value in a form that it is given, or that of another tensor."""
_READ_NOTHING = (*CONSTANTS, aten.empty_like, aten.new_empty, aten.new_empty_strided)


class Operations(TorchDispatchMode):
    """Notes which ATen operations run, and what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "prim":  # questions, such as which device
            self.seen.append((func, (args, kwargs)))
        return func(*args, **(kwargs or {}))


def run_alone(node: Node) -> tuple[Any, list[Any], list[Node]] | None:
    """Run a function or method of plain tensors and sizes with other values of the same form.

    Returns:
        The result, the ATen operations that ran, and the tensors whose values the call reads: ``x.to(y)`` reads ``x``.
        None for any other call.
    """
    examples: dict[Node, Any] = {x: x.meta.get("example_value") for x in node.all_input_nodes}
    given = [x for x in examples.values() if not isinstance(x, (int, torch.SymInt))]
    fakes = [x for x in (*given, node.meta.get("example_value")) if type(x) is torch._subclasses.FakeTensor]
    if node.op not in ("call_function", "call_method") or isinstance(node.target, HigherOrderOperator):
        return None
    if not fakes or any(type(x) is not torch._subclasses.FakeTensor for x in given):
        return None
    with torch.no_grad(), fakes[0].fake_mode:
        twins = {x: twin(example) for x, example in examples.items()}
        args, kwargs = map_arg((node.args, node.kwargs), twins.__getitem__)
        run: Any = getattr(args[0], str(node.target)) if node.op == "call_method" else node.target
        with Operations() as ran:
            out = run(*args[node.op == "call_method" :], **kwargs)
    reading = [given for func, given in ran.seen if func.overloadpacket not in _READ_NOTHING]
    read = {id(x) for x in tree_leaves((reading, out)) if isinstance(x, torch.Tensor)}
    return out, [func for func, _ in ran.seen], [node for node, x in twins.items() if id(x) in read]
