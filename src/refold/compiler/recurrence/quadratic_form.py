"""Read causal attention without a softmax, whose weights are written out for all pairs of tokens.

    Y[i] = sum over j <= i of (C[i] . B[j]) exp(S[j,i]) X[j]

``S`` are sums of one log decay between two tokens, or their distance times a rate, or zero. So these are the outputs of
the scan ``H <- exp(a) H + B X``, ``Y = C . H`` (Dao & Gu 2024, arXiv:2405.21060, section 3): retention, gated linear
attention with one decay per head, and plain linear attention, in what their papers call the parallel form. Its work
and memory grow with the square of the tokens, those of the scan with their number.

The weights are a product in any order and spelling, and in any dtype that they have on the way. Their mask is a
``where``, or a factor of ones and zeros, or part of the decays. Decays are the exponential of a segment sum, or a power
whose exponent is the distance ``i - j``, also times what depends on neither.

Shapes. X is (b, h, t, p), C and B are (b, h, t, n), and decays (b, h, t, t). Axes may be in another order, split,
merged or missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from ..ir.fx import CASTS, MATMULS, arg, fix, is_tensor, known, power, sizes, value
from ..ir.index import Factor, Product, align, contraction, expand, index, leaf, read_further
from ..ir.metadata import in_numbers
from ..ir.symbols import Label, atoms, broadcast, extent, resolve, unify
from .chunked_form import NotAScan, ScanForm, check_symbols, require
from .segment_sums import Segments, constant_value, filled, keeps_below, segments, unify_all

aten = torch.ops.aten

SHORTEST = 512
"""Tokens from which on a scan is looked for. What has fewer is a chunk of a longer sequence, or as fast as it is."""
LARGEST = 2**28
"""Elements of the largest constant that is computed, to see what it is: masks of 16,384 tokens."""


@dataclass
class _Weights:
    """Reads the factors of weights, through masks that let a token read itself and those before it.

    Attributes:
        kind: The dtype of what is read: values that were widened from it are read as they were before.
        masks: For each the symbols of the tokens that read, and of those that are read.
        divisors: What weights are divided by, as those of a token are by their sum.
    """

    kind: torch.dtype
    masks: list[tuple[Label, Label]] = field(default_factory=list)
    divisors: list[Product] = field(default_factory=list)

    def __call__(self, node: Node) -> Product | None:
        if node.target is aten.where.self and (split := filled(node, 0.0)) is not None:
            return self._kept(split[0], arg(node, 0), split[1])
        if node.target is aten.mul.Tensor:
            pair: Any = node.args
            for x, mask in (pair, pair[::-1]):
                both = is_tensor(x) and is_tensor(mask) and value(mask).dtype == torch.bool
                if both and value(x).dtype == value(node).dtype and value(x).shape == value(node).shape:
                    return self._kept(x, mask, True)
            if all(is_tensor(x) and value(x).is_floating_point() for x in pair):
                return align(*map(leaf, pair))  # also of two dtypes
        if node.target in CASTS:
            source: Node = arg(node, 0)
            rounds = all(value(x).is_floating_point() and value(x).itemsize > 1 for x in (source, node))
            same = value(source).dtype == self.kind and value(node).dtype == torch.float32
            return index(source) if rounds and (same or _places(leaf(node).labels)) else None
        if node.target is aten.div.Tensor and not node.kwargs and is_tensor(arg(node, 0)):
            return self._divided(arg(node, 0), arg(node, 1))
        if node.target is aten.full.default and isinstance(arg(node, 1), int | float):
            return Product(leaf(node).labels, (), float(arg(node, 1)))
        return read_further(node)

    def _kept(self, x: Node, mask: Node, keeps: bool) -> Product | None:
        inner = index(x)
        labels = inner.labels
        for i, j in _places(labels):
            if keeps_below(mask, len(labels), i, j, keeps, diagonal=0):
                self.masks.append((labels[i], labels[j]))
                return inner
        return None

    def _divided(self, x: Node, y: Any) -> Product | None:
        inner = index(x)
        if isinstance(y, int | float):
            return replace(inner, scale=inner.scale / y) if y else None
        if not (is_tensor(y) and value(x).dtype == value(y).dtype and _places(inner.labels)):
            return None
        if (by := _within(y, inner.labels)) is not None:
            self.divisors.append(by)
        return inner if by is not None else None


def _within(node: Node, labels: tuple[Label, ...]) -> Product | None:
    """Read what is broadcast to axes with these labels."""
    read = index(node, top=False)
    both = broadcast(read.labels, labels)
    return read if both is not None and atoms(both) == atoms(labels) else None


def _places(labels: tuple[Label, ...]) -> list[tuple[int, int]]:
    """List pairs of axes that may be the two tokens of a weight."""
    long = [axis for axis, label in enumerate(labels) if extent(label) >= SHORTEST]
    return [(i, j) for i in long for j in long if i != j and extent(labels[i]) == extent(labels[j])]


def fix_sizes(root: Node) -> bool:
    """Make numbers of the sizes of a product that is attention with those that it had when traced; tell whether it is.

    Masks are told by their values, for which sizes must be numbers. So what is no attention keeps its symbols.
    """
    weights = [x for x in root.all_input_nodes if root.target in MATMULS and _is_square(x)]
    if not weights or all(isinstance(known(size), int) for size in value(root).shape):
        return False
    try:
        read_attention(in_numbers(root, lambda x: x.target in MATMULS and not _is_square(x)))
    except NotAScan:
        return False
    return fix([*value(root).shape, *value(weights[0]).shape])


def _is_square(node: Node) -> bool:
    """Tell whether a product of matrices has a number for each two of many tokens."""
    return sizes(node)[-1] == sizes(node)[-2] >= SHORTEST


def read_attention(root: Node) -> ScanForm:
    """Read a product of weights and values, or a sum of weights, or raise `NotAScan`."""
    first = contraction(root)
    if first is None or not SHORTEST**2 <= extent(first.bound) ** 2 <= LARGEST:
        raise NotAScan
    after, weights = first.bound, _Weights(value(root).dtype)
    whole = expand(first, weights)
    pairs, rest, masks = list[Segments](), list[Factor](), weights.masks
    for factor in whole.factors:
        timed = set(resolve(after)) & set(factor.axes()) and not factor.pending
        found = _decay(factor.node) if timed else None
        if found is None or not unify_all(found.labels, factor.labels):
            rest.append(factor)
            continue
        pairs.append(found)
    tokens = [*masks, *((pair.upto or (), pair.after or ()) for pair in pairs)]
    require(masks or any(pair.causal for pair in pairs))
    upto, after = (resolve(label) for label in tokens[0])
    require(all((resolve(i), resolve(j)) == (upto, after) for i, j in [*tokens, (upto, first.bound)]))
    decays = [pair for pair in pairs if pair.source.scale != 0.0]
    require(len(decays) <= 1)
    none = Segments((), Product((), (), 0.0), (), upto, after)
    pair = decays[0] if decays else none
    written = [factor for factor in rest if set(after) & set(factor.axes())]
    queries = [factor for factor in rest if factor not in written]
    summed = tuple(axis for axis in resolve(whole.bound) if axis not in after)
    require(summed and written and any(set(upto) & set(factor.axes()) for factor in queries))
    check_symbols(whole, (), pair, summed, (pair.source.factors, queries, written))
    outer = {*atoms(whole.labels)}
    require(all(by.present() <= outer and not by.bound for by in weights.divisors))
    require(unify(after, upto) and (not pair.step or unify(pair.step, upto)))
    return ScanForm(
        y=whole, states=None, decays=pair.source, queries=Product((), tuple(queries), whole.scale),
        written=Product((), tuple(written)), time=upto, padded=upto, summed=summed,
        divisors=tuple(weights.divisors),
    )  # fmt: skip


def _decay(node: Node) -> Segments | None:
    """Read decays between tokens, or a mask of ones and zeros, which is none; None if it is neither."""
    if (read := power(node)) is None:
        return _powers(node)
    exponent, masks = _cleared(read[0])
    found = segments(exponent) or _distances(exponent)
    if found is None or found.upto is None or found.after is None:
        return None
    labels = [resolve(label) for label in found.labels]
    i, j = labels.index(resolve(found.upto)), labels.index(resolve(found.after))
    if not all(keeps_below(mask, len(labels), i, j, keeps, diagonal=0) for mask, keeps, _ in masks):
        return None
    source, ends = replace(found.source, scale=found.source.scale * read[1]), any(fill == -inf for *_, fill in masks)
    if (ends or found.causal) and read[1] < 0:
        return None  # a power of minus infinity that is infinite
    return replace(found, source=source, causal=ends or found.causal)


def _cleared(node: Node) -> tuple[Node, list[tuple[Node, bool, float]]]:
    """Look through conditions that put a zero or minus infinity where they do not keep an exponent."""
    masks = list[tuple[Node, bool, float]]()
    while node.target is aten.where.self:
        found = next(((fill, split) for fill in (0.0, -inf) if (split := filled(node, fill)) is not None), None)
        if found is None:
            break
        fill, (kept, keeps) = found
        masks.append((arg(node, 0), keeps, fill))
        node = kept
    return node, masks


def _tables(node: Any, labels: tuple[Label, ...]) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield the axes of two tokens of a constant, and its values as a matrix, if it differs along no other axis."""
    if not is_tensor(node) or value(node).numel() > LARGEST or (found := constant_value(node)) is None:
        return
    found = found.reshape((1,) * (len(labels) - found.ndim) + found.shape)
    for i, j in _places(labels):
        if found.size == found.shape[i] ** 2 and found.shape[i] == found.shape[j]:
            yield i, j, np.moveaxis(found, (i, j), (0, 1)).reshape(found.shape[i], -1)


def _distances(node: Node) -> Segments | None:
    """Read the distance between two tokens, times a number or what depends on neither, as sums of that."""
    labels, given, parts = leaf(node).labels, tuple[Any, ...](node.args), [(node, 1.0)]
    if node.target is aten.mul.Tensor:
        parts += [given, given[::-1]]
    for constant, rate in parts:
        for i, j, table in _tables(constant, labels):
            step, places = float(table[1, 0]), np.arange(len(table))
            apart = (step * (places[:, None] - places)).astype(table.dtype)
            if step and np.array_equal(np.tril(table), np.tril(apart)):
                source = _rated(rate, labels, (i, j))
                if source is not None:
                    scaled = replace(source, scale=source.scale * step)
                    return Segments(labels, scaled, (), labels[i], labels[j])
    return None


def _rated(rate: Any, labels: tuple[Label, ...], tokens: tuple[int, int]) -> Product | None:
    """Read what distances are multiplied by, which must not depend on tokens."""
    if not is_tensor(rate):
        return Product((), (), float(rate))
    read = _within(rate, labels)
    if read is None or any({*resolve(labels[axis])} & read.present() for axis in tokens):
        return None
    return Product((), read.factors, read.scale)


def _powers(node: Node) -> Segments | None:
    """Read a constant of zeros where a token reads later ones, and elsewhere powers of their distance, or ones."""
    labels = leaf(node).labels
    for i, j, table in _tables(node, labels):
        n, kind = len(table), table.dtype if table.dtype.kind == "f" else np.dtype(np.float32)
        column, tiny = table[:, 0].astype(float), float(np.finfo(kind).tiny)
        if column[0] != 1 or not np.all((column >= 0) & (column < inf)):
            continue
        last = int(np.flatnonzero(column > tiny)[-1])
        rate = float(np.log(column[last])) / max(last, 1)
        fallen = np.exp(rate * np.arange(n))[::-1].astype(kind)
        ideal = np.lib.stride_tricks.sliding_window_view(np.append(fallen, np.zeros(n - 1, kind)), n)[::-1]
        if np.allclose(table, ideal, 64 * np.finfo(kind).eps, tiny):
            return Segments(labels, Product((), (), rate), (), labels[i], labels[j], causal=True)
    return None
