"""PyTorch's ``associative_scan`` operation, by its definition.

Inductor has no code for the operation on the CPU. Its gradient is that of independent results, so that a factor gets
none of the gradient of what it multiplied (torch 2.13). And what it combines is in a graph of its own, which the passes
do not read. Its definition is a tree of calls of that graph (Blelloch 1990, CMU-CS-90-190).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..inductor import duplicate
from ..ir.fx import take_place


def define_scans(gm: GraphModule, everywhere: bool) -> GraphModule:
    """Replace PyTorch's ``associative_scan`` operation by its definition.

    Args:
        gm: A Dynamo graph; not changed.
        everywhere: Whether it is replaced also where Inductor has code for it.

    Returns:
        The graph with the definitions; the graph itself if there is nothing to replace.
    """

    def to_replace(node: Any) -> bool:
        return is_scan(node) and (everywhere or not has_code(node.args[1][0].meta["example_value"].device))

    if not any(map(to_replace, gm.graph.nodes)):
        return gm
    gm = duplicate(gm)
    for node in list(filter(to_replace, gm.graph.nodes)):
        combine, xs, others = node.args
        name = f"{node.name}_definition"
        gm.add_submodule(name, Neighbours(gm.get_submodule(str(combine.target)), len(xs)))  # type: ignore[arg-type]
        with gm.graph.inserting_before(node):
            call = gm.graph.call_module(name, (*xs, *others))
        take_place(call, node)
    gm.recompile()
    return gm


def has_code(device: torch.device) -> bool:
    """Tell whether Inductor generates code for the operation on a device."""
    return device.type != "cpu"


def is_scan(node: Node) -> bool:
    """Tell whether a call is that of PyTorch's ``associative_scan``."""
    return node.op == "call_function" and getattr(node.target, "_name", "") == "associative_scan"


class Neighbours(torch.nn.Module):
    """An ``associative_scan`` along axis 0 by its definition: a tree of calls of the graph that combines neighbours."""

    def __init__(self, combine: GraphModule, count: int) -> None:
        super().__init__()
        self.combine, self.count = combine, count

    def forward(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return all prefixes of the first ``count`` operands; the others are the same for all."""
        xs, rest = operands[: self.count], operands[self.count :]
        combined = torch.vmap(self.combine, (*[0] * (2 * self.count), *[None] * len(rest)))
        return tuple(_prefixes(lambda left, right: combined(*left, *right, *rest), xs))


def _prefixes(combine: Callable[..., Sequence[torch.Tensor]], xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return x[0], x[0] x[1], ... along axis 0; ``combine`` is the product of neighbours, the earlier one first."""
    count = xs[0].shape[0]
    if count < 2:
        return list(xs)
    odd = _prefixes(combine, combine([x[: count - 1 : 2] for x in xs], [x[1::2] for x in xs]))
    even = [x[:1] for x in xs]
    if count > 2:
        later = combine([x[: (count - 1) // 2] for x in odd], [x[2::2] for x in xs])
        even = [torch.cat(pair) for pair in zip(even, later, strict=True)]
    pairs = [torch.stack([e[: o.shape[0]], o], 1).flatten(0, 1) for e, o in zip(even, odd, strict=True)]
    return pairs if count % 2 == 0 else [torch.cat([p, e[-1:]]) for p, e in zip(pairs, even, strict=True)]
