"""Hand a short causal convolution of each channel to the operator that it is, on a GPU.

Written out as multiply-adds (`unroll_depthwise_convolutions`), such a convolution fuses with its neighbours. But its
values lie in memory as the library leaves them, with time last, and a scan after it copies what it reads. Its backward
does not fuse: the gradients of the taps are sums over all of time, one per tap. The operator reads and writes channels
last, as the projections before and after it, and its backward is one pass. Where all that reads the result is a SiLU,
the operator computes that too: otherwise the result is written and read again for it, forward and backward.

Shapes. The input is (b, c, t), weights are (c, 1, w), the result is (b, c, t).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, Node

from ..ir.builder import Builder, between
from ..ir.cost import has_pointwise_kernels
from ..ir.fx import CONVERT, arg, same, value
from ..ir.operators import CONVOLUTION
from ..ir.rewrite import Rewrite, replace_node
from ..ir.silu import silu_argument

aten = torch.ops.aten


def replace_causal_convolutions(graph: Graph, wanted: Callable[[str], bool]) -> Iterator[Rewrite]:
    """Replace depthwise convolutions that see no later input by ``causal_conv1d``."""
    for conv in graph.find_nodes(op="call_function", target=aten.convolution.default):
        found = _read(conv) if has_pointwise_kernels(value(conv).device) else None
        if found is None:
            continue
        x, roots = found
        places = {node: i for i, node in enumerate(graph.nodes)}
        found_ends = [(root, _ends(root, wanted)) for root in roots]
        complete = all(ends for _, ends in found_ends)
        results: dict[bool, tuple[Node, set[Node]]] = {}  # with a SiLU or without: all roots hold the same numbers
        for root, ends in sorted(found_ends, key=lambda found: places[found[1][0][0]]) if complete else ():
            silu = ends[0][0] is not root
            if silu not in results:
                build = Builder(ends[0][0])
                y = _convolved(build, conv, x, "silu" if silu else None)
                if root is not conv and not silu:  # a part, as the original is
                    y = build.call(aten.constant_pad_nd.default, y, [0, value(conv).shape[2] - value(root).shape[2]])
                    y = build.call(aten.slice.Tensor, y, 2, 0, value(root).shape[2])
                results[silu] = y, set(build.added)
            y, made = results[silu]
            channels, _, width = value(arg(conv, 1)).shape
            with_silu = ", and a SiLU," if silu else ""
            for end, order in ends:
                build = Builder(end)
                new = build.restride(build.permute(y, order), value(end))
                yield replace_node(
                    end,
                    new,
                    added=made.union(build.added),
                    name="replace causal convolution",
                    why="its values lie in memory with time last, and its gradients are sums over time for each tap",
                    detail=f"{width} taps of {channels} channels{with_silu} as one {CONVOLUTION.name}",
                    multilinear=not silu,
                    terms=width + 1,
                    timed_alone=False,
                )
        graph.eliminate_dead_code()


def _convolved(build: Builder, conv: Node, x: Node, activation: str | None) -> Node:
    """Emit the operator; its result is (b, c, t), as that of the convolution."""
    tokens = build.permute(x, [0, 2, 1])
    taps = build.call(aten.select.int, arg(conv, 1), 1, 0)
    given = CONVOLUTION.args(x=tokens, weight=taps, bias=arg(conv, 2), activation=activation)
    return build.permute(build.call(getitem, build.call(CONVOLUTION.target, *given), 0), [0, 2, 1])


def _ends(root: Node, wanted: Callable[[str], bool]) -> list[tuple[Node, list[int]]]:
    """List the nodes that become the result, as `_silus` does: the SiLUs of a value, or else the value itself."""
    silus = _silus(root)
    if silus and all(wanted(end.name) for end, _ in silus):
        return silus
    return [(root, [0, 1, 2])] if wanted(root.name) else []


def _silus(root: Node) -> list[tuple[Node, list[int]]]:
    """Return the SiLUs of a value that nothing else reads, each with the order that the axes have there by then.

    The value may be permuted, copied and widened before it; then the SiLU ends where it is narrowed again.
    """
    ends: list[tuple[Node, list[int]]] = []
    stack = [(root, [0, 1, 2])]
    while stack:
        node, order = stack.pop()
        silus = [user for user in node.users if silu_argument(user) is node]
        inner = set[Node]().union(*(between(silu, [node]) for silu in silus))
        if any(user not in inner and user not in silus for x in inner for user in x.users):
            return []
        for user in node.users.keys() - inner:
            if user.target is aten.permute.default:
                stack.append((user, [order[dim] for dim in arg(user, 1)]))
            elif user.target is aten.clone.default or (user.target is CONVERT and value(user).dtype == torch.float32):
                stack.append((user, order))
            elif user not in silus:
                return []
        for silu in silus:
            end = silu
            if value(silu).dtype != value(root).dtype:
                (end, *others) = silu.users
                if others or end.target is not CONVERT or value(end).dtype != value(root).dtype:
                    return []
            ends.append((end, order))
    places = {node: i for i, node in enumerate(root.graph.nodes)}
    return sorted(ends, key=lambda found: places[found[0]])


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
