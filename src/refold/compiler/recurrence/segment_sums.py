"""Segment sums: values that are the sum of some ``a`` over the positions between two axes, however spelled.

With ``P`` the running sum of ``a`` along an axis, state space code needs ``P[i]`` (from the start), ``P[-1] - P[i]``
(to the end) and ``P[i] - P[j]`` (between). The last is also written as a running sum over a copy of ``a``, which a mask
has cleared on and above the diagonal. The sum is then masked to ``-inf`` above the diagonal. So its exponential is the
decay from each position to each later one. Dao & Gu 2024 (arXiv:2405.21060), listing 1, calls this ``segsum``.

Shapes. ``a`` is (..., t): sums from the start or to the end are (..., t), and those between positions (..., t, t). Axes
may be in any order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

import numpy as np
import torch
from torch.fx import GraphModule, Node

from ..ir.builder import extract, is_constant
from ..ir.evaluate import evaluate
from ..ir.fx import arg, is_tensor, power, same, sum_dims, value
from ..ir.index import Factor, Product, expand, index
from ..ir.symbols import Axis, Label, broadcast, resolve, unify
from ..ir.views import is_view
from ..private import without_modes

aten = torch.ops.aten


@dataclass(frozen=True)
class Segments:
    """A value that is a sum of ``a`` over positions ``after < position <= upto``.

    Attributes:
        labels: What the axes of the value mean.
        source: ``a`` in index notation.
        step: The symbols in ``source`` that are summed over.
        upto: The last position, inclusive, as symbols of the value; None for the end.
        after: The position before the first; None for the start.
        causal: Whether positions with ``after > upto`` count as minus infinity.
    """

    labels: tuple[Label, ...]
    source: Product
    step: Label
    upto: Label | None
    after: Label | None
    causal: bool = False


def decay(node: Node) -> Segments | None:
    """Read a value as the exponential of a segment sum, or another power that grows with it."""
    if (read := power(node)) is not None and read[1] > 0 and (sums := segments(read[0])) is not None:
        return replace(sums, source=replace(sums.source, scale=sums.source.scale * read[1]))
    if node.target is aten.where.self and (split := filled(node, 0.0)) is not None:
        kept, keep_true = split
        inner = index(kept, top=False)
        (factor,) = inner.factors if len(inner.factors) == 1 else (None,)
        if factor is None or factor.pending or inner.scale != 1.0:
            return None
        found = decay(factor.node)
        if found is None or not unify_all(found.labels, factor.labels):
            return None
        return _causal(node, replace(found, labels=inner.labels), keep_true)
    return None


def segments(node: Node) -> Segments | None:
    """Read a value as a segment sum, through views."""
    seen = index(node, top=False)
    if len(seen.factors) != 1 or seen.scale != 1.0 or seen.bound or seen.factors[0].pending:
        return None
    (factor,) = seen.factors
    found = _direct(factor.node)
    if found is None or not unify_all(found.labels, factor.labels):
        return None
    return replace(found, labels=seen.labels)


def same_source(a: Segments, b: Segments) -> bool:
    """Tell whether two segment sums add up the same values; unifies what corresponds."""
    return a.source.scale == b.source.scale and pair(a.source.factors, b.source.factors) and unify(a.step, b.step)


def pair(ours: tuple[Factor, ...] | list[Factor], theirs: tuple[Factor, ...] | list[Factor]) -> bool:
    """Tell whether two lists hold the same nodes, in any order; unifies the symbols they are read at."""
    left = list(theirs)
    for factor in ours:
        other = next((x for x in left if (x.node, x.pending) == (factor.node, factor.pending)), None)
        if other is None or not unify_all(factor.labels, other.labels):
            return False
        left.remove(other)
    return not left


def unify_all(a: tuple[Label, ...], b: tuple[Label, ...], but: int | None = None) -> bool:
    """Unify labels one by one, except those of one axis."""
    return len(a) == len(b) and all(unify(x, y) for dim, (x, y) in enumerate(zip(a, b, strict=True)) if dim != but)


def _direct(node: Node) -> Segments | None:
    if node.op != "call_function" or not is_tensor(node) or not value(node).is_floating_point():
        return None
    if node.target is aten.cumsum.default:
        return _between(node) or _running(node)
    if node.target is aten.sum.dim_IntList:
        dims = sum_dims(node)
        found = _source(arg(node, 0), dims[0]) if len(dims) == 1 else None
        if found is None:
            return None
        source, step = found
        keepdim = bool(arg(node, 2, "keepdim", False))
        labels = (*source.labels[: dims[0]], *([()] if keepdim else []), *source.labels[dims[0] + 1 :])
        return Segments(labels, source, step, None, None)
    if node.target in (aten.slice.Tensor, aten.select.int):
        return _last(node)
    if node.target is aten.sub.Tensor and not node.kwargs and all(is_tensor(x) for x in node.args):
        return _difference(node)
    if node.target is aten.where.self and (split := filled(node, -inf)) is not None:
        inner = segments(split[0])
        return None if inner is None else _causal(node, inner, split[1])
    return None


def _source(x: Node, dim: int) -> tuple[Product, Label] | None:
    product = expand(index(x))
    step = resolve(product.labels[dim])
    return None if product.bound or not step else (product, step)


def _running(node: Node) -> Segments | None:
    """Read a running sum: from the start to each position."""
    dim = arg(node, 1, "dim") % value(node).dim()
    found = _source(arg(node, 0), dim)
    if found is None:
        return None
    source, step = found
    upto = tuple(Axis(axis.size) for axis in step)
    labels = (*source.labels[:dim], upto, *source.labels[dim + 1 :])
    return Segments(labels, source, step, upto, None)


def _between(node: Node) -> Segments | None:
    """Read a running sum over masked copies: between each two positions."""
    dim = arg(node, 1, "dim") % value(node).dim()
    found = masked_copies(node, dim)
    if found is None:
        return None
    _, read, copies, _ = found
    source = expand(read)
    step, after = resolve(source.labels[dim]), resolve(source.labels[copies])
    upto = tuple(Axis(axis.size) for axis in step)
    labels = tuple(upto if d == dim else label for d, label in enumerate(source.labels))
    return Segments(labels, source, step, upto, after)


def _last(node: Node) -> Segments | None:
    """Read the last of a running sum: from the start to the end."""
    x, dim = arg(node, 0), arg(node, 1, "dim", 0) % value(arg(node, 0)).dim()
    size = value(x).shape[dim]
    start = arg(node, 2, "index" if node.target is aten.select.int else "start", 0)
    if start not in (-1, size - 1):
        return None
    inner = segments(x)
    if inner is None or inner.upto is None or inner.after is not None:
        return None
    if resolve(inner.labels[dim]) != resolve(inner.upto):
        return None
    gone: tuple[Label, ...] = () if node.target is aten.select.int else ((),)
    return replace(inner, labels=(*inner.labels[:dim], *gone, *inner.labels[dim + 1 :]), upto=None)


def _difference(node: Node) -> Segments | None:
    """Read the difference of two running sums: from where the second ends to where the first does."""
    a, b = segments(arg(node, 0)), segments(arg(node, 1))
    if a is None or b is None or a.after is not None or b.after is not None or b.upto is None:
        return None
    labels = broadcast(a.labels, b.labels)
    return replace(a, labels=labels, after=b.upto) if labels is not None and same_source(a, b) else None


def filled(node: Node, number: float) -> tuple[Node, bool] | None:
    """Return the tensor of a ``where`` between a tensor and a number, and whether it is kept where the mask is true."""
    for kept, fill, keep_true in ((1, 2, True), (2, 1, False)):
        x, constant = arg(node, kept), arg(node, fill)
        if (
            isinstance(constant, Node)
            and constant.target in (aten.scalar_tensor.default, aten.full.default)
            and arg(constant, 0 if constant.target is aten.scalar_tensor.default else 1) == number
            and is_tensor(x)
            and value(x).shape == value(node).shape
        ):
            return x, keep_true
    return None


def _causal(node: Node, inner: Segments, keep_true: bool) -> Segments | None:
    """Read a mask that keeps ``after <= upto``."""
    if inner.upto is None or inner.after is None:
        return None
    labels = [resolve(label) for label in inner.labels]
    if resolve(inner.upto) not in labels or resolve(inner.after) not in labels:
        return None
    i, j = labels.index(resolve(inner.upto)), labels.index(resolve(inner.after))
    if i == j or not keeps_below(arg(node, 0), value(node).dim(), i, j, keep_true, diagonal=0):
        return None
    return replace(inner, causal=True)


def masked_copies(total: Node, i: int) -> tuple[Node, Product, int, bool] | None:
    """Match a sum over the axis i of ``where(mask, ...)`` that keeps a copy of a at ``[i, j]`` only where i > j.

    Returns:
        What is summed, the copied value in index notation, the axis j along which it is constant, and whether the mask
        is true where it is kept.
    """
    masked = arg(total, 0)
    while masked.target is aten.clone.default and is_view(masked):
        masked = arg(masked, 0)
    if masked.target is not aten.where.self:
        return None
    shape = value(masked).shape
    split = filled(masked, 0.0)
    if split is None or not all(isinstance(size, int) for size in shape):
        return None
    source, keep_true = split
    read = index(source, top=False)
    if len(read.factors) != 1 or read.bound:
        return None
    constant = set(read.repeated())
    for j, label in enumerate(read.labels):
        copies = j != i and label and set(resolve(label)) <= constant and same(shape[i], shape[j])
        if copies and keeps_below(arg(masked, 0), len(shape), i, j, keep_true, diagonal=-1):
            return masked, read, j, keep_true
    return None


def keeps_below(mask: Node, rank: int, i: int, j: int, keep_true: bool, diagonal: int) -> bool:
    """Tell whether a mask keeps exactly ``i + diagonal >= j``, whatever the other axes."""
    constant = constant_value(mask)
    if constant is None or constant.dtype != np.bool_:
        return False
    kept = constant if keep_true else ~constant
    kept = np.moveaxis(kept.reshape((1,) * (rank - kept.ndim) + kept.shape), (i, j), (0, 1))
    length = len(kept)
    triangle = np.tri(length, k=diagonal, dtype=bool)
    return bool(kept.size == length**2 and np.array_equal(kept.reshape(length, -1), triangle))


def constant_value(node: Node) -> np.ndarray | None:
    """Compute a value that depends on no input; one of 16 bits or fewer as float32, since NumPy lacks bfloat16."""
    outside = without_modes()
    if outside is None or not is_constant(node):
        return None
    gm: GraphModule = extract(node, [])
    for inner in gm.graph.nodes:
        if "device" in inner.kwargs:
            inner.update_kwarg("device", torch.device("cpu"))
    with outside:
        result = evaluate(gm.cpu(), [])
        return (result.float() if result.is_floating_point() and result.itemsize <= 2 else result).numpy()
