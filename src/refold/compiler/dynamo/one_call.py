"""One call of a Dynamo graph, run alone: what it does, and which of its inputs it reads."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from ..ir.fx import known
from ..private import HigherOrderOperator, TorchDispatchMode, tree_leaves

aten = torch.ops.aten
CONSTANTS = (
    aten.zeros, aten.ones, aten.full, aten.zeros_like, aten.ones_like, aten.full_like, aten.new_zeros, aten.new_ones,
    aten.new_full,
)  # fmt: skip
"""What makes one value in a form that it is given, or that of another tensor."""


def twin(x: Any) -> Any:
    """Make another tensor of the same form, with numbers for the sizes that are known by now; return all else."""
    if not isinstance(x, torch.Tensor):
        return x if isinstance(x, int) else known(x)
    shape, strides = ([known(n) for n in sizes] for sizes in (x.shape, x.stride()))
    return torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device)


class Operations(TorchDispatchMode):
    """Notes which ATen operations run, and the tensors whose values they read, not their form alone."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.read: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "prim":  # questions, such as which device
            self.seen.append(func)
            if func.overloadpacket not in CONSTANTS:
                self.read += [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        return func(*args, **(kwargs or {}))


def can_run_alone(node: Node) -> bool:
    """Tell whether a node is a function or method of plain tensors and sizes."""
    given = [x.meta.get("example_value") for x in node.all_input_nodes]
    tensors = [x for x in given if not isinstance(x, (int, torch.SymInt))]
    plain = node.op in ("call_function", "call_method") and not isinstance(node.target, HigherOrderOperator)
    return plain and all(type(x) is torch._subclasses.FakeTensor for x in tensors)


def run_alone(node: Node) -> tuple[Any, list[Any], list[Node]]:
    """Run a call for which `can_run_alone` holds with other values of the same form.

    Returns:
        The result, the ATen operations that ran, and the tensors whose values the call reads: ``x.to(y)`` reads ``x``.
    """
    examples: dict[Node, Any] = {x: x.meta["example_value"] for x in node.all_input_nodes}
    tensors = [x for x in (*examples.values(), node.meta.get("example_value")) if isinstance(x, torch.Tensor)]
    mode: Any = tensors[0].fake_mode  # type: ignore[attr-defined]
    with torch.no_grad(), mode, Operations() as ran:
        twins = {x: twin(example) for x, example in examples.items()}
        ran.seen.clear()
        args, kwargs = map_arg((node.args, node.kwargs), twins.__getitem__)
        run: Any = getattr(args[0], str(node.target)) if node.op == "call_method" else node.target
        out = run(*args[node.op == "call_method" :], **kwargs)
    read = {id(x) for x in (*ran.read, *tree_leaves(out)) if isinstance(x, torch.Tensor)}
    return out, ran.seen, [node for node, x in twins.items() if id(x) in read]
