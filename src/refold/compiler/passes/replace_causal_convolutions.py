"""Hand a short causal convolution of each channel to the operator that it is, in training on a GPU.

Written out as multiply-adds (`unroll_depthwise_convolutions`), such a convolution fuses with its neighbours. Its
backward does not: the gradients of the taps are sums over all of time, one per tap, and values that autograd keeps lie
in memory as the library leaves them, with time last. The operator reads and writes channels last, as the projections
before and after it, and its backward is one pass.

Shapes. The input is (b, c, t), weights are (c, 1, w), the result is (b, c, t).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, Node

from ...ops.torch.registry import OPS, node_args
from ..ir.builder import Builder
from ..ir.fx import arg, is_training, same, value
from ..ir.rewrite import Rewrite, replace_node

aten = torch.ops.aten


def replace_causal_convolutions(graph: Graph, wanted: Callable[[str], bool]) -> Iterator[Rewrite]:
    """Replace depthwise convolutions that see no later input by ``causal_conv1d``."""
    if is_training(graph) or not torch.is_grad_enabled():
        return
    for conv in graph.find_nodes(op="call_function", target=aten.convolution.default):
        found = _read(conv) if pays(value(conv).device) else None
        if found is None or not all(wanted(root.name) for root in found[1]):
            continue
        x, roots = found
        for root in roots:
            build = Builder(root)
            tokens = build.permute(x, [0, 2, 1])
            taps = build.call(aten.select.int, (arg(conv, 1), 1, 0))
            result = build.call(
                OPS["causal_conv1d"], node_args("causal_conv1d", x=tokens, weight=taps, bias=arg(conv, 2))
            )
            y = build.permute(build.call(getitem, (result, 0)), [0, 2, 1])
            if root is not conv:  # a part, as the original is
                beyond = [0, value(conv).shape[2] - value(root).shape[2]]
                y = build.call(aten.constant_pad_nd.default, (y, beyond))
                y = build.call(aten.slice.Tensor, (y, 2, 0, value(root).shape[2]))
            yield replace_node(
                root,
                build.restride(y, value(root)),
                added=build.added,
                name="replace causal convolution",
                why="its gradients are sums over time for each tap, and its values lie in memory with time last",
                detail=f"{value(taps).shape[1]} taps of {value(taps).shape[0]} channels as one causal_conv1d",
                multilinear=True,
                terms=value(taps).shape[1] + 1,
                timed_alone=False,
            )
        graph.eliminate_dead_code()


def pays(device: torch.device) -> bool:
    """Tell whether the operator has a kernel of its own with a backward: on a CPU fused code is faster."""
    return device.type == "cuda"


def _read(conv: Node) -> tuple[Node, list[Node]] | None:
    """Return the input of a causal convolution, and the nodes that hold its result without what comes after the end."""
    args: Any = conv.args
    x, weight, _, stride, padding, dilation, transposed, _, groups = args
    width = value(weight).shape[2] if value(weight).dim() == 3 else 0
    padded = None
    if list(padding) == [0] and x.target is aten.constant_pad_nd.default and not any(x.args[2:]):
        x = padded = x.args[0] if list(x.args[1]) == [width - 1, 0] else None
    if x is None:
        return None
    depthwise = (
        value(x).dim() == 3
        and value(x).dtype in (torch.float16, torch.bfloat16, torch.float32)
        and value(x).dtype == value(weight).dtype
        and same(value(x).shape[1], groups)
        and same(value(weight).shape[0], groups)
        and same(value(x).stride(1), 1)
        and isinstance(width, int)
        and width > 1
        and all(not same(size, 0) for size in value(x).shape)
    )
    if not depthwise or transposed or list(stride) != [1] or list(dilation) != [1]:
        return None
    if padded is not None:
        return padded, [conv]
    tokens = value(x).shape[2]
    heads = [user for user in conv.users if _is_head(user, tokens, width)]
    return (x, heads) if list(padding) == [width - 1] and heads and len(heads) == len(conv.users) else None


def _is_head(node: Node, tokens: Any, width: int) -> bool:
    """Tell whether a node takes the first steps of a convolution's result, as many as its input has."""
    if node.target is not aten.slice.Tensor or arg(node, 1, "dim", 0) % 3 != 2 or arg(node, 4, "step", 1) != 1:
        return False
    return arg(node, 2, "start") in (0, None) and same(value(node).shape[2], tokens)
