"""Spell a short depthwise convolution as shifted multiplications, so that it fuses with its neighbours.

A causal convolution of width 4 over each channel is four multiply-adds an element. As a library call, it reads and
writes the whole sequence by itself. On NVIDIA GPUs the call takes five times longer than its bytes need. Written as
``sum over k of w[c, k] x[c, t + k]``, it is fused with the activation after it and the split before it. Half precision
inputs are accumulated in float32, as the library does.

Shapes. The input is (b, c, t), weights are (c, 1, w), the result is (b, c, t'), with t' = t + padding - w + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.fx import Graph, Node

from ..ir.builder import Builder
from ..ir.fx import CONVERT, arg, same, value
from ..ir.rewrite import Rewrite, replace_node

aten = torch.ops.aten

# Wider filters reuse enough data to be better off in a library.
WIDEST = 8
_END = 2**63 - 1


def unroll_depthwise_convolutions(graph: Graph, wanted: Callable[[str], bool]) -> Iterator[Rewrite]:
    """Replace one-dimensional depthwise convolutions of stride 1 and small width."""
    for root in graph.find_nodes(op="call_function", target=aten.convolution.default):
        x, weight, bias, stride, padding, dilation, transposed, _, groups = root.args
        if not (wanted(root.name) and _is_depthwise(root) and list(stride) == [1] and not transposed):
            continue
        width = int(value(weight).shape[2])
        build = Builder(root)
        half = value(root).dtype in (torch.float16, torch.bfloat16)

        def wide(node: Node, build: Builder = build, half: bool = half) -> Node:
            return build.call(CONVERT, node, torch.float32) if half else node

        source, taps = wide(x), wide(weight)
        terms = []
        for k in range(width):
            # Products are padded, not inputs: zero times an infinite weight would be NaN.
            first = k * dilation[0] - padding[0]
            beyond = padding[0] - (width - 1 - k) * dilation[0]
            shifted = build.call(aten.slice.Tensor, source, 2, max(first, 0), beyond if beyond < 0 else _END)
            tap = build.call(aten.select.int, taps, 2, k)  # (c, 1)
            term = build.call(aten.mul.Tensor, shifted, tap)
            margins = [max(-first, 0), max(beyond, 0)]
            terms.append(build.call(aten.constant_pad_nd.default, term, margins, 0.0) if any(margins) else term)
        total = terms[0]
        for term in terms[1:]:
            total = build.call(aten.add.Tensor, total, term)
        if bias is not None:
            total = build.call(aten.add.Tensor, total, build.call(aten.unsqueeze.default, wide(bias), 1))
        new = build.call(CONVERT, total, value(root).dtype) if half else total
        yield replace_node(
            root,
            build.restride(new, value(root)),
            inside=(),
            added=build.added,
            name="unroll depthwise convolution",
            why="a short convolution of each channel runs as a kernel of its own",
            detail=f"y[b,d,t] = sum over {width} taps of w[d,k] x[b,d,t+k] (d={groups})",
            multilinear=True,
            terms=width + 1,
            timed_alone=False,
        )
        graph.eliminate_dead_code()


def _is_depthwise(root: Node) -> bool:
    """Tell whether every channel is convolved by itself, over one axis, with few taps."""
    x, weight, groups = value(arg(root, 0)), value(arg(root, 1)), arg(root, 8)
    return (
        x.dim() == 3
        and x.is_floating_point()
        and x.dtype == weight.dtype
        and same(x.shape[1], groups)
        and same(weight.shape[0], groups)
        and isinstance(weight.shape[2], int)
        and 1 < weight.shape[2] <= WIDEST
        and all(not same(size, 0) for size in (*x.shape, *value(root).shape))
    )
