"""What a graph costs: floating-point operations, and bytes when every node runs by itself.

Bytes are counted as eager PyTorch moves them: each node that computes reads its inputs and writes
its output once; views are free. A fusing compiler moves less, so bytes say what *could* be wasted
and FLOPs what *is* done whatever the fusion.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.utils.flop_counter import flop_registry

from ..private import OpOverload, schema
from .fx import CASTS, concrete
from .views import is_view

aten = torch.ops.aten


_COPIES = (*CASTS, aten.clone.default, aten.repeat.default, aten.constant_pad_nd.default, aten.full.default)


@dataclass(frozen=True)
class Cost:
    """FLOPs done, bytes moved between operations, and bytes of the largest value written."""

    flops: int = 0
    bytes: int = 0
    largest: int = 0

    def __add__(self, other: Cost) -> Cost:
        """Return the cost of doing both."""
        return Cost(self.flops + other.flops, self.bytes + other.bytes, max(self.largest, other.largest))


# So many times fewer bytes are "several times fewer".
SEVERAL = 4


def clearly_less(new: Cost, old: Cost, times: int = SEVERAL) -> bool:
    """Tell whether something does no more operations than something else and moves so many times fewer bytes."""
    return new.flops <= old.flops and times * new.bytes <= old.bytes


# So many times fewer calls are "many times fewer".
MANY = 8


def calls_far_less(new: int, old: int) -> bool:
    """Tell whether a program makes many times fewer calls than another that runs eagerly, call by call."""
    return MANY * new <= old


def has_pointwise_kernels(device: torch.device) -> bool:
    """Tell whether pointwise operators have kernels of their own: on a CPU fused code is faster."""
    return device.type == "cuda"


def numel(val: Any) -> int:
    """Return the number of elements of a (fake) tensor; 0 for anything else."""
    return math.prod(concrete(size) for size in val.shape) if isinstance(val, torch.Tensor) else 0


def nbytes(val: Any) -> int:
    """Return the bytes of a (fake) tensor's elements; 0 for anything else."""
    return numel(val) * val.element_size() if isinstance(val, torch.Tensor) else 0


def node_cost(node: Node) -> Cost:
    """Return the cost of one node when it runs by itself."""
    if node.op != "call_function" or _is_free(node):
        return Cost()
    val = node.meta.get("val")
    outputs = [x for x in (val if isinstance(val, (tuple, list)) else [val]) if isinstance(x, torch.Tensor)]
    if not outputs:
        return Cost()
    inputs = [arg.meta.get("val") for arg in node.all_input_nodes]
    moved = sum(nbytes(x) for x in (*outputs, *inputs))
    return Cost(_flops(node, outputs, inputs), moved, max(nbytes(x) for x in outputs))


def _is_free(node: Node) -> bool:
    """Tell whether a node moves no data: what it returns is a part of its input, or a part of a tuple."""
    if node.target is operator.getitem:
        return True
    if is_view(node):
        return node.target not in (aten.clone.default, aten.repeat.default)
    returns = schema(node.target).returns if isinstance(node.target, OpOverload) else ()
    return any(out.alias_info is not None and not out.alias_info.is_write for out in returns)


def _flops(node: Node, outputs: list[torch.Tensor], inputs: list[Any]) -> int:
    packet = getattr(node.target, "overloadpacket", None)
    if packet in flop_registry:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        return concrete(flop_registry[packet](*args, **kwargs, out_val=node.meta["val"]))
    if node.target in _COPIES or not any(x.is_floating_point() for x in outputs):
        return 0
    return max(numel(x) for x in (*outputs, *inputs))


def computing(nodes: Iterable[Node]) -> int:
    """Return how many of several nodes move data."""
    return sum(node_cost(node).bytes > 0 for node in nodes)


def graph_cost(nodes: Iterable[Node]) -> Cost:
    """Return the cost of several nodes."""
    return sum((node_cost(node) for node in nodes), Cost())
