"""Sum a convolution's input instead of its result: a mean over space needs no convolution over space.

A result of a convolution is a sum over offsets k of the kernel of weights times the input, shifted by k. In a sum over
an axis of space, the shifts along that axis only decide which border of the input is left out. So the sum is the total
of the input, less the sums of a few border rows for each k. What is left is a convolution over the other axes of space
with one input channel for each channel and offset, or, if nothing is left, a product of matrices.

Shapes. The input is (b, c, *space), weights are (o, c / groups, *kernel), the result is (b, o, *the space that is
left).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from ..ir.builder import Builder
from ..ir.fx import SUMS_OVER_AXES, arg, sum_dims, value
from ..ir.rewrite import Rewrite, replace_node

aten = torch.ops.aten

_SCALES = (aten.mul.Tensor, aten.div.Tensor)


@dataclass(frozen=True)
class _Convolution:
    """The arguments of a convolution over axes 2 and up."""

    x: Node
    weight: Node
    bias: Node | None
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]


def sum_convolutions(graph: Graph, wanted: Callable[[str], bool]) -> Iterator[Rewrite]:
    """Replace sums and means over axes of space of a convolution by sums of its input."""
    for root in list(graph.nodes):
        if root.target not in SUMS_OVER_AXES or not wanted(root.name):
            continue
        found = _read(root)
        if found is None:
            continue
        node, call, scale, inside = found
        dims = sum_dims(root)
        if min(dims) < 2 or value(root).dtype not in (torch.float32, torch.float64):
            continue
        build = Builder(root)
        rest = _summed(build, call, value(node), dims)
        count = math.prod(int(value(node).shape[dim]) for dim in dims)
        factor = scale / count if root.target is aten.mean.dim else scale
        rest = build.times(rest, factor)
        if call.bias is not None:
            each = scale if root.target is aten.mean.dim else scale * count
            bias = build.times(call.bias, each)
            shape = [-1] + [1] * (value(rest).dim() - 2)
            rest = build.call(aten.add.Tensor, rest, build.call(aten.view.default, bias, shape))
        new = build.reshape(rest, list(value(root).shape))
        yield replace_node(
            root,
            build.restride(new, value(root)),
            inside=inside,
            added=build.added,
            name="sum a convolution's input",
            why="a convolution is computed only to be summed over space",
            detail=f"sum over axes {dims} of a convolution of {tuple(value(call.x).shape)} by "
            f"{tuple(value(call.weight).shape)}",
            multilinear=False,
            terms=count * math.prod(int(size) for size in value(call.weight).shape) // int(value(node).shape[1]),
        )
        graph.eliminate_dead_code()


def _read(root: Node) -> tuple[Node, _Convolution, float, list[Node]] | None:
    """Return the convolution that a sum reads, by what number it is scaled, and the nodes between."""
    inside: list[Node] = []
    node, scale = arg(root, 0), 1.0
    while node.target in _SCALES and len(node.users) == 1 and isinstance(node.args[1], (int, float)) and node.args[1]:
        number = float(node.args[1])
        scale, inside = (scale * number if node.target is _SCALES[0] else scale / number), [*inside, node]
        node = node.args[0]  # type: ignore[assignment]
        if not isinstance(node, Node):
            return None
    if node.target is not aten.convolution.default or len(node.users) != 1 or arg(node, 8) != 1:
        return None
    shapes: list[Any] = [*value(node).shape, *value(arg(node, 0)).shape, *value(arg(node, 1)).shape]
    if not all(isinstance(size, int) and size > 0 for size in shapes):
        return None
    rank = value(node).dim() - 2
    lists = [list(arg(node, i)) * (rank if len(arg(node, i)) == 1 else 1) for i in (3, 4, 5, 7)]
    if value(arg(node, 0)).dim() != rank + 2 or not all(isinstance(n, int) for one in lists for n in one):
        return None
    stride, padding, dilation, output_padding = lists
    call = _Convolution(
        arg(node, 0), arg(node, 1), arg(node, 2), stride, padding, dilation, arg(node, 6), output_padding
    )
    return node, call, scale, [*inside, node]


def _summed(build: Builder, call: _Convolution, out: torch.Tensor, dims: list[int]) -> Node:
    """Return the convolution summed over axes of its result, without its bias; batch, channels, and what is left."""
    rank = out.dim() - 2
    x = call.x  # (b, c, space); each summed axis is replaced by the offsets of the kernel
    kernel = [int(size) for size in value(call.weight).shape[2:]]
    for dim in dims:
        x = _shifted(build, call, x, dim, int(out.shape[dim]), kernel[dim - 2])
    kept = [dim for dim in range(2, rank + 2) if dim not in dims]
    batch, channels = value(x).shape[:2]
    x = build.permute(x, [0, 1, *dims, *kept])
    offsets = math.prod(kernel[dim - 2] for dim in dims)
    rows = int(channels) * offsets
    x = build.reshape(x, [int(batch), rows, *(int(value(x).shape[2 + len(dims) + i]) for i in range(len(kept)))])
    # Weights are (in, out, space) if transposed, else (out, in, space).
    source, target = (0, 1) if call.transposed else (1, 0)
    outs = int(value(call.weight).shape[target])
    weight = build.permute(call.weight, [source, *dims, target, *kept])
    weight = build.reshape(weight, [rows, outs, *(kernel[dim - 2] for dim in kept)])
    if not kept:
        return build.call(aten.mm.default, x, weight)
    if not call.transposed:
        weight = build.permute(weight, [1, 0, *range(2, 2 + len(kept))])
    lists = [[values[dim - 2] for dim in kept] for values in (call.stride, call.padding, call.dilation)]
    more = [call.transposed, [call.output_padding[dim - 2] for dim in kept], 1]
    return build.call(aten.convolution.default, x, weight, None, *lists, *more)


def _shifted(build: Builder, call: _Convolution, x: Node, dim: int, length: int, kernel: int) -> Node:
    """Return for each offset of the kernel the sum of those positions of an axis that meet a result.

    The axis of x, (b, c, *space), gets the size of the kernel.
    """
    size = int(value(x).shape[dim])
    stride, padding, dilation = (values[dim - 2] for values in (call.stride, call.padding, call.dilation))
    total = build.call(aten.sum.dim_IntList, x, [dim], True)
    sums = []
    for k in range(kernel):
        shift = k * dilation - padding
        if call.transposed:  # position q goes to q * stride + shift
            first, last, step = max(0, -(shift // stride)), min(size - 1, (length - 1 - shift) // stride), 1
        else:  # result p reads p * stride + shift
            start = max(0, -(shift // stride)) * stride + shift
            end = min(length - 1, (size - 1 - shift) // stride) * stride + shift
            first, last, step = start, end, stride
        if last < first:
            sums.append(build.call(aten.mul.Tensor, total, 0))
        elif step == 1 and 2 * (last - first + 1) > size:
            part = total
            for low, high in ((0, first), (last + 1, size)):
                if low < high:
                    border = build.call(aten.slice.Tensor, x, dim, low, high)
                    border = build.call(aten.sum.dim_IntList, border, [dim], True)
                    part = build.call(aten.sub.Tensor, part, border)
            sums.append(part)
        else:
            part = build.call(aten.slice.Tensor, x, dim, first, last + 1, step)
            sums.append(build.call(aten.sum.dim_IntList, part, [dim], True))
    return build.call(aten.cat.default, sums, dim) if len(sums) > 1 else sums[0]
