"""Compute segment sums as differences of one prefix sum, so that they fuse.

Naive state space code writes ``s[i, j] = a[j+1] + ... + a[i]`` as a cumulative sum over a masked
T x T copy of ``a``. A cumulative sum ends a fused kernel, so that copy is written, summed and read
again. With ``P`` the prefix sum of ``a``, ``s[i, j] = P[i] - P[j]``: elementwise, and only ``P`` is
stored. In single precision the difference would cancel where ``|P|`` is large, so ``P`` and the
difference are float64; the result is more exact than the original's running sum.

Infinities are counted apart, since ``P[i] - P[j]`` would be NaN after them: ``P`` is that of the
finite values, and a second prefix sum counts minus infinities, as 1, and what else is not finite, as
2^32. Where its difference is not zero, the segment is minus infinity, or no number.

Shapes. ``a`` is (..., T, ...), ``s`` is (..., T, T, ...) with the axes i and j, ``P`` is (..., T, ...) over i. Source:
sums over a range as differences of prefix sums are summed-area tables in one dimension (Crow 1984).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf, nan

import torch
from torch.fx import Graph, Node

from ..ir.builder import Builder
from ..ir.contract import lay_out, operand
from ..ir.fx import CONVERT, arg, value
from ..ir.rewrite import Rewrite, replace_node
from ..recurrence.segment_sums import masked_copies

aten = torch.ops.aten

# Counts for more than all minus infinities of a sum.
_OTHER = 2.0**32


def difference_segment_sums(graph: Graph, wanted: Callable[[str], bool]) -> Iterator[Rewrite]:
    """Replace ``cumsum(masked copy of a)`` by a difference of prefix sums."""
    for root in graph.find_nodes(op="call_function", target=aten.cumsum.default):
        if not wanted(root.name) or "dtype" in root.kwargs or value(root).dtype != torch.float32:
            continue
        if not (rank := value(root).dim()):
            continue
        i = arg(root, 1, "dim") % rank
        found = masked_copies(root, i)
        if found is None:
            continue
        masked, read, j, keep_true = found
        build = Builder(root, read.through)
        mask = arg(masked, 0)
        keep = mask if keep_true else build.call(aten.logical_not.default, mask)
        # The copies are equal along j: sum up one of them.
        one = replace(read, labels=(*read.labels[:j], *read.labels[j + 1 :]))
        row = build.times(lay_out(build, operand(build, read.factors[0]), one), read.scale)
        zero, never, unknown, one_, other = (_scalar(build, number, root) for number in (0.0, -inf, nan, 1.0, _OTHER))
        finite = build.call(aten.lt.Scalar, build.call(aten.abs.default, row), inf)
        forgets = build.call(aten.eq.Scalar, row, -inf)
        counted = build.call(aten.where.self, forgets, one_, build.call(aten.where.self, finite, zero, other))
        difference, passed = (
            _difference(build, part, i, j, rank) for part in (build.call(aten.where.self, finite, row, zero), counted)
        )
        narrow = build.call(CONVERT, difference, torch.float32)
        infinite = build.call(aten.where.self, build.call(aten.lt.Scalar, passed, _OTHER), never, unknown)
        narrow = build.call(aten.where.self, build.call(aten.eq.Scalar, passed, 0), narrow, infinite)
        new = build.call(aten.where.self, keep, narrow, zero)
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
            timed_alone=False,
        )


def _scalar(build: Builder, number: float, like: Node) -> Node:
    return build.call(aten.scalar_tensor.default, number, dtype=torch.float32, device=value(like).device)


def _difference(build: Builder, row: Node, i: int, j: int, rank: int) -> Node:
    """Return ``P[i] - P[j]`` in float64, P the prefix sums along i of a value without axis j."""
    prefix = build.call(aten.cumsum.default, row, i - (j < i), dtype=torch.float64)
    later = build.call(aten.unsqueeze.default, prefix, j)
    earlier = build.call(aten.unsqueeze.default, build.permute(prefix, _moved(rank, i, j)), i)
    return build.call(aten.sub.Tensor, later, earlier)


def _moved(rank: int, i: int, j: int) -> list[int]:
    """Return the order that moves axis i of a value without axis j to where j was, i left out."""
    # Axes of the prefix sum: all but j. After the permutation: all but i, with i's axis at j's place.
    axes = [axis for axis in range(rank) if axis != j]
    target = [i if axis == j else axis for axis in range(rank) if axis != i]
    return [axes.index(axis) for axis in target]
