"""Multiply one input by several matrices at once: naive layers project the same tokens to B, C and the step separately.

The matrices are put side by side, and the result is cut. The input is then read once, and a wide product uses a
processor better than several narrow ones. But the matrices are copied in each call, since they may change between two
calls. So it is tried only where that copy is smaller than what is saved, and kept where it is measured to be faster.

Shapes. One input (rows, k) and matrices (k, n1), (k, n2), ... give (rows, n1), (rows, n2), ... by way of
(rows, n1 + n2 + ...). Source: one of the substitutions that Jia et al. 2019 (TASO) found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from ..ir.builder import Builder, sort_topologically, upstream
from ..ir.fx import arg, is_tensor, value
from ..ir.rewrite import Rewrite, replace_node

aten = torch.ops.aten

_PRODUCTS: dict[Any, int] = {aten.mm.default: 0, aten.addmm.default: 1}  # where the first matrix stands
_VIEWS = (aten.view.default, aten.reshape.default, aten.permute.default)
MOST = 8


def merge_products(graph: Graph, wanted: Callable[[str], bool]) -> Iterator[Rewrite]:
    """Replace products of one matrix with several others by one product."""
    groups: dict[Any, list[Node]] = {}
    for node in graph.nodes:
        at = _PRODUCTS.get(node.target)
        if at is not None and node.users and _plain(node, at):
            groups.setdefault(_same(arg(node, at)), []).append(node)
    for group in groups.values():
        roots = [root for root in _independent(group) if wanted(root.name)][:MOST]
        if len(roots) < 2 or not _pays(roots):
            continue
        yield _merged(graph, roots)


def _plain(node: Node, at: int) -> bool:
    tensors = [x for x in node.args if isinstance(x, Node) and is_tensor(x)]
    sizes = [size for x in (*tensors, node) for size in value(x).shape]
    return (
        not node.kwargs
        and len(node.args) == at + 2
        and all(isinstance(size, int) and size > 0 for size in sizes)
        and value(node).is_floating_point()
        and all(value(x).dtype == value(node).dtype for x in tensors)
        and (not at or value(tensors[0]).shape == value(node).shape[1:])
    )


def _same(x: Node) -> Any:
    """Make a key that is equal for two nodes that read one matrix: equal views of one value."""
    if x.target in _VIEWS:
        return x.target, x.args[0], str(x.args[1:])
    return x


def _independent(group: list[Node]) -> list[Node]:
    """Return products of which none is needed to compute another's operands."""
    chosen: list[Node] = []
    for root in group:
        before = upstream(root)
        if not any(other in before for other in chosen):
            chosen.append(root)
    return chosen


def _pays(roots: list[Node]) -> bool:
    """Tell whether reading the input once saves more than copying the matrices costs."""
    rows = value(roots[0]).shape[0]
    return (len(roots) - 1) * rows >= 2 * sum(value(root).shape[1] for root in roots)


def _merged(graph: Graph, roots: list[Node]) -> Rewrite:
    """Replace products (m, k) @ (k, n) of one (m, k) by slices of its product with all of (k, n) side by side."""
    last = roots[-1]
    build = Builder(last)
    x = arg(roots[0], _PRODUCTS[roots[0].target])
    wide = build.call(aten.cat.default, [arg(root, _PRODUCTS[root.target] + 1) for root in roots], 1)
    product = build.call(aten.mm.default, x, wide)
    views = [node for node in (arg(root, _PRODUCTS[root.target]) for root in roots) if node.target in _VIEWS]
    news, start = [], 0
    for root in roots:
        width = int(value(root).shape[1])
        part = build.call(aten.slice.Tensor, product, 1, start, start + width)
        if _PRODUCTS[root.target]:
            part = build.call(aten.add.Tensor, part, arg(root, 0))
        news.append(build.restride(part, value(root)))
        start += width
    rows, depth = value(x).shape
    widths = " + ".join(str(int(value(root).shape[1])) for root in roots)
    record = replace_node(
        roots,
        news,
        inside=views,
        added=[*build.added, *views],
        name="merge products",
        why="the same matrix is read for each of several products",
        detail=f"({rows} x {depth}) @ ({depth} x ({widths}))",
        multilinear=True,
        terms=int(depth) + 1,
    )
    for root in reversed(roots):
        graph.erase_node(root)
    sort_topologically(graph)
    return record
