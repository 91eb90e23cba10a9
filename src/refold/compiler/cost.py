"""What a graph costs: floating-point operations, and bytes when every node runs by itself.

Bytes are counted as eager PyTorch moves them: each node that computes reads its inputs and writes
its output once; views are free. A fusing compiler moves less, so bytes say what *could* be wasted
and FLOPs what *is* done whatever the fusion.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.utils.flop_counter import flop_registry

from .index import Size, is_view

aten = torch.ops.aten


@dataclass(frozen=True)
class Cost:
    """FLOPs done, bytes moved between operations, and bytes of the largest value written."""

    flops: int = 0
    bytes: int = 0
    largest: int = 0

    def __add__(self, other: Cost) -> Cost:
        """Return the cost of doing both."""
        return Cost(self.flops + other.flops, self.bytes + other.bytes, max(self.largest, other.largest))


def concrete(size: Size) -> int:
    """Return a size as a number: for a symbol, the value it had when traced."""
    return size if isinstance(size, int) else int(size.node.hint)  # type: ignore[union-attr]


def numel(val: Any) -> int:
    """Return the number of elements of a (fake) tensor; 0 for anything else."""
    return math.prod(concrete(size) for size in val.shape) if isinstance(val, torch.Tensor) else 0


def nbytes(val: Any) -> int:
    """Return the bytes of a (fake) tensor's elements; 0 for anything else."""
    return numel(val) * val.element_size() if isinstance(val, torch.Tensor) else 0


def node_cost(node: Node) -> Cost:
    """Return the cost of one node when it runs by itself."""
    val = node.meta.get("val")
    free = is_view(node) and node.target is not aten.clone.default
    if node.op != "call_function" or free or not isinstance(val, torch.Tensor):
        return Cost()
    inputs = [arg.meta.get("val") for arg in node.all_input_nodes]
    moved = nbytes(val) + sum(nbytes(x) for x in inputs)
    return Cost(_flops(node, val, inputs), moved, nbytes(val))


def _flops(node: Node, val: torch.Tensor, inputs: list[Any]) -> int:
    packet = getattr(node.target, "overloadpacket", None)
    if packet in flop_registry:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        return concrete(flop_registry[packet](*args, **kwargs, out_val=val))
    if node.target in (aten.clone.default, aten._to_copy.default, aten.constant_pad_nd.default, aten.full.default):
        return 0
    return max([numel(val), *(numel(x) for x in inputs if x is not None)]) if val.is_floating_point() else 0


def graph_cost(nodes: Iterable[Node]) -> Cost:
    """Return the cost of several nodes."""
    return sum((node_cost(node) for node in nodes), Cost())
