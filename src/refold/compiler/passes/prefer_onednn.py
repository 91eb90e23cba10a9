"""Hand large float32 matrix products on the CPU to oneDNN.

ATen calls MKL for them. On AMD processors with AVX-512, MKL reaches less than half the speed of oneDNN. Two projections
of a Granite layer with 256 tokens took 37.0 ms with MKL and 17.6 ms with oneDNN (2 threads of a Zen 5 EPYC). On other
processors MKL may be faster. So each product is measured both ways, and is replaced only if oneDNN is faster.

Shapes. (rows, k) @ (k, columns), with a bias (columns,) or without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils.flop_counter import register_flop_formula

from ...ops.torch.nodes import define
from ..ir.builder import Builder
from ..ir.fx import arg, value
from ..ir.rewrite import Rewrite, replace_node

aten = torch.ops.aten

# Fewer multiply-adds than this are done before oneDNN has looked its kernel up.
SMALLEST = 1 << 22


def _by_onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``x (m, k) @ weight (n, k).T + bias (n)`` by oneDNN; opaque, so that Inductor hands it dense operands.

    For a weight with gaps in memory, oneDNN has no kernel: it multiplies number by number, a thousand times slower.
    """
    if not (weight.is_contiguous() or weight.mT.is_contiguous()):
        weight = weight.contiguous()
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


ONEDNN_LINEAR = define(
    "onednn_linear",
    "(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    _by_onednn,
    lambda x, weight, bias: x.new_empty(x.shape[0], weight.shape[0]),
)


@register_flop_formula(torch.ops.refold.onednn_linear)
def _flops(x: Any, weight: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * math.prod(x) * weight[0]


def prefer_onednn(graph: Graph, wanted: Callable[[str], bool]) -> Iterator[Rewrite]:
    """Replace ``mm`` and ``addmm`` of float32 values on the CPU by oneDNN's linear operation."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return
    for root in [*_calls(graph, aten.mm.default), *_calls(graph, aten.addmm.default)]:
        operands: list[Any] = list(root.args)
        *bias, a, b = operands
        if not (wanted(root.name) and _is_large_product(a, b) and _is_row(root, bias)):
            continue
        build = Builder(root)
        # linear(x, w) is x @ w.T
        weight = arg(b, 0) if _is_transpose(b) else build.call(aten.permute.default, b, [1, 0])
        linear = build.call(ONEDNN_LINEAR, a, weight, bias[0] if bias else None)
        rows, depth = value(a).shape
        yield replace_node(
            root,
            build.restride(linear, value(root)),
            inside=(b,) if _is_transpose(b) else (),
            added=build.added,
            name="prefer oneDNN",
            why="MKL may not use this processor's widest instructions",
            detail=f"({rows} x {depth}) @ ({depth} x {value(b).shape[1]})",
            multilinear=True,
            terms=int(depth) + len(bias),
        )
        graph.erase_node(root)


def _calls(graph: Graph, target: Any) -> list[Node]:
    return list(graph.find_nodes(op="call_function", target=target))


def _is_large_product(a: Any, b: Any) -> bool:
    x, y = value(a), value(b)
    sizes = [*x.shape, y.shape[1]]
    return (
        x.device.type == "cpu"
        and x.dtype == y.dtype == torch.float32
        and all(isinstance(size, int) for size in sizes)
        and math.prod(sizes) >= SMALLEST
    )


def _is_row(root: Node, bias: list[Any]) -> bool:
    """Tell whether there is no bias, or one unscaled float32 number a column."""
    return not bias or (
        not root.kwargs and value(bias[0]).dtype == torch.float32 and value(bias[0]).shape == value(root).shape[1:]
    )


def _is_transpose(node: Node) -> bool:
    return node.target is aten.permute.default and list(arg(node, 1)) == [1, 0]
