"""Compute segment sums as differences of one prefix sum, so that they fuse.

Naive state space code writes ``s[i, j] = a[j+1] + ... + a[i]`` as a cumulative sum over a masked
T x T copy of ``a``. A cumulative sum ends a fused kernel, so that copy is written, summed and read
again. With ``P`` the prefix sum of ``a``, ``s[i, j] = P[i] - P[j]``: elementwise, and only ``P`` is
stored. In single precision the difference would cancel where ``|P|`` is large, so ``P`` and the
difference are float64; the result is more exact than the original's running sum.

Infinities are the one difference: if some ``a`` is infinite, ``P[i] - P[j]`` can be NaN where the
original is finite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from ..evaluate import evaluate
from ..graph import Builder, extract, is_constant, lay_out, operand
from ..index import Product, arg, index, is_tensor, is_view, resolve, same, value
from ..rewrite import Rewrite, replace_node

aten = torch.ops.aten


def difference_segment_sums(graph: Graph, wanted: Callable[[str], bool]) -> Iterator[Rewrite]:
    """Replace ``cumsum(masked copy of a)`` by a difference of prefix sums."""
    for root in graph.find_nodes(op="call_function", target=aten.cumsum.default):
        if not wanted(root.name) or "dtype" in root.kwargs or value(root).dtype != torch.float32:
            continue
        masked = arg(root, 0)
        while is_view(masked) and masked.target is aten.clone.default:
            masked = arg(masked, 0)
        if masked.target is not aten.where.self:
            continue
        rank = value(root).dim()
        i = arg(root, 1, "dim") % rank
        found = _segments(masked, i)
        if found is None:
            continue
        read, j, keep = found
        build = Builder(root, read.through)
        # The copies are equal along j: sum up one of them.
        one = replace(read, labels=(*read.labels[:j], *read.labels[j + 1 :]))
        row = lay_out(build, operand(build, read.factors[0]), one)
        prefix = build.call(aten.cumsum.default, (row, i - (j < i)), {"dtype": torch.float64})
        ahead = build.call(aten.unsqueeze.default, (prefix, j))
        behind = build.call(aten.unsqueeze.default, (build.permute(prefix, _moved(rank, i, j)), i))
        difference = build.call(aten.sub.Tensor, (ahead, behind))
        narrow = build.call(torch.ops.prims.convert_element_type.default, (difference, torch.float32))
        zero = build.call(aten.scalar_tensor.default, (0.0,), {"dtype": torch.float32, "device": value(root).device})
        new = build.call(aten.where.self, (keep, narrow, zero))
        yield replace_node(
            root,
            build.restride(new, value(root)),
            inside=(masked, arg(root, 0), *read.through),
            added=build.added,
            name="difference segment sums",
            why="a cumulative sum over a masked copy cannot be fused",
            detail=f"s[i,j] = P[i] - P[j], P float64 ({value(root).shape[i]} x {value(root).shape[j]} segments)",
            multilinear=True,
            terms=int(value(root).shape[i]),
            raced_alone=False,
        )


def _moved(rank: int, i: int, j: int) -> list[int]:
    """Return the order that moves axis i of a value without axis j to where j was, i left out."""
    # Axes of the prefix sum: all but j. After the permutation: all but i, with i's axis at j's place.
    axes = [axis for axis in range(rank) if axis != j]
    target = [i if axis == j else axis for axis in range(rank) if axis != i]
    return [axes.index(axis) for axis in target]


def _segments(masked: Node, i: int) -> tuple[Product, int, Node] | None:
    """Match ``where(mask, ...)`` that keeps a copy of a at ``[i, j]`` only below the diagonal.

    Returns:
        The copied value in index notation, the axis j along which it is constant, and a mask that is true where kept.
    """
    mask, on_true, on_false = (arg(masked, position) for position in range(3))
    shape = value(masked).shape
    if not all(isinstance(size, int) for size in shape):
        return None
    zero, source, negate = (on_true, on_false, True) if _is_zero(on_true) else (on_false, on_true, False)
    if not (_is_zero(zero) and is_tensor(source) and list(value(source).shape) == list(shape)):
        return None
    read = index(source, top=False)
    if len(read.factors) != 1 or read.scale != 1.0 or read.bound:
        return None
    constant = set(read.repeated())
    candidates = [
        dim for dim, label in enumerate(read.labels) if dim != i and label and set(resolve(label)) <= constant
    ]
    for j in candidates:
        if same(shape[i], shape[j]) and (keep := _strictly_below(mask, len(shape), i, j, negate)) is not None:
            return read, j, keep
    return None


def _is_zero(node: object) -> bool:
    return isinstance(node, Node) and node.target is aten.scalar_tensor.default and arg(node, 0) == 0


def _strictly_below(mask: Node, rank: int, i: int, j: int, negate: bool) -> Node | None:
    """Return a node true exactly where i > j, if the mask is that (or, negated, its complement)."""
    constant = _constant(mask)
    if constant is None or constant.dtype != np.bool_:
        return None
    kept = ~constant if negate else constant
    kept = np.moveaxis(kept.reshape((1,) * (rank - kept.ndim) + kept.shape), (i, j), (0, 1))
    length = len(kept)
    if kept.size != length**2 or not np.array_equal(kept.reshape(length, -1), np.tri(length, k=-1, dtype=bool)):
        return None
    if not negate:
        return mask
    build = Builder(mask)
    mask_after = mask.next
    with mask.graph.inserting_before(mask_after):
        node = mask.graph.call_function(aten.logical_not.default, (mask,))
    node.meta = {**mask.meta}
    with build.fake_mode:
        node.meta["val"] = torch.logical_not(value(mask))
    return node


def _constant(mask: Node) -> np.ndarray | None:
    """Compute a mask that depends on no input."""
    if not is_constant(mask):
        return None
    gm: GraphModule = extract(mask, [])
    for node in gm.graph.nodes:
        if "device" in node.kwargs:
            node.update_kwarg("device", torch.device("cpu"))
    with _disable_current_modes():
        return evaluate(gm, []).numpy()
