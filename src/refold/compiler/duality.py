"""From a scan whose states are only read through a contraction to the operator that never writes them.

The states ``h`` of a scan are (time, batch, ..., n). Where ``y = sum over n of h * C`` is all that
reads them, and the scan's factors are ``decay * exp(dt * A)`` and its inputs ``dt * x * B``, where
decay does not span n and no factor of the inputs spans both x's axes and n, that is a selective
scan; if the factors are ``exp(dt * A)`` and depend on neither x's last axis nor n, it is a state
space dual, which is matrix products. Factors are read in index notation, so the spelling does not
matter. What cannot be read that way stays a scan.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from operator import getitem
from typing import Any

import torch
from torch.fx import Node

from ..ops.library import OPS
from .index import Product, arg, index, matmul_product, resolve, sum_product, value
from .timewise import Emitter, Value

aten = torch.ops.aten


@dataclass(frozen=True)
class Term:
    """A factor: a node, and for each of its axes which axis of the states it runs along."""

    node: Node
    places: tuple[int | None, ...]

    def spans(self) -> set[int]:
        """Return the axes of the states that it depends on."""
        return {place for place in self.places if place is not None}


def terms(node: Node, places: tuple[int | None, ...]) -> tuple[float, list[Term]]:
    """Split a value into factors as far as index notation sees them; (scale, factors)."""
    return _split(index(node), node, places)


def _split(product: Product, node: Node, places: tuple[int | None, ...]) -> tuple[float, list[Term]]:
    whole = (1.0, [Term(node, places)])
    where: dict[Any, int | None] = {}
    for label, place in zip(product.labels, places, strict=True):
        axes = resolve(label)
        if len(axes) > 1:
            return whole
        where.update(dict.fromkeys(axes, place))
    scale = product.scale
    found: list[Term] = []
    for factor in product.factors:
        labels = [resolve(label) for label in factor.labels]
        if factor.steps or any(len(label) > 1 or (label and label[0] not in where) for label in labels):
            return whole
        own = tuple(where[label[0]] if label else None for label in labels)
        if factor.node is node:
            found.append(Term(node, own))
            continue
        inner, parts = terms(factor.node, own)
        scale, found = scale * inner, found + parts
    return scale, found


@dataclass
class Reading:
    """How ``y`` reads the states: the axis that is summed, and the other factors."""

    node: Node
    summed: int
    scale: float
    others: list[Term]
    out: tuple[int | None, ...]


def reading(node: Node, states: Node, rank: int) -> Reading | None:
    """Read a contraction of the states; ``states`` is (batch, time, ...)."""
    if node.target is aten.sum.dim_IntList:
        product = sum_product(node)
    elif node.target is aten.bmm.default:
        product = matmul_product(node)
    else:
        return None
    if product is None or [factor.node for factor in product.factors].count(states) != 1:
        return None
    (mine,) = (factor for factor in product.factors if factor.node is states)
    where: dict[Any, int] = {}
    for place, label in zip((1, 0, *range(2, rank)), mine.labels, strict=True):
        axes = resolve(label)
        if len(axes) > 1 or mine.steps:
            return None
        where.update(dict.fromkeys(axes, place))
    bound = resolve(product.bound)
    if len(bound) != 1 or bound[0] not in where:
        return None
    scale = product.scale
    others: list[Term] = []
    for factor in product.factors:
        if factor is mine:
            continue
        labels = [resolve(label) for label in factor.labels]
        if factor.steps or any(len(label) > 1 or (label and label[0] not in where) for label in labels):
            return None
        inner, parts = terms(factor.node, tuple(where[label[0]] if label else None for label in labels))
        scale, others = scale * inner, others + parts
    layout = [axis for label in product.labels for axis in resolve(label)]
    if any(axis not in where for axis in layout):
        return None
    return Reading(node, where[bound[0]], scale, others, tuple(where[axis] for axis in layout))


def lower(
    emit: Emitter, read: Reading, scale: Value | None, offset: Value | None, shape: list[int], initial: Node | None
) -> tuple[Node, Node] | None:
    """Emit the operator for ``y``.

    Args:
        emit: Where to.
        read: How the states are read.
        scale: What each state is multiplied by on the way to the next; None for 1.
        offset: What is added.
        shape: Shape of all states: (time, batch, ...).
        initial: The state before the first; None for zeros.

    Returns:
        ``y`` as ``read.node`` has it, and the last state; None if no operator fits.
    """
    if offset is None or not offset.timed:
        return None
    rank, n = len(shape), read.summed
    kept = [place for place in range(2, rank) if place != n]
    every = tuple(range(rank))
    rate, exponent = 0.0, list[Term]()
    weight, decays = 1.0, list[Term]()
    if scale is not None and scale.node != 1.0:
        if not isinstance(scale.node, Node):
            return None
        factors = emit.padded(scale, rank - 1)
        found = _decay(factors, every[rank - value(factors).dim() :], n)
        if found is None:
            return None
        (rate, exponent), (weight, decays) = found
    steps = [term for term in exponent if term.spans() & {0, 1}]
    rates = [term for term in exponent if not term.spans() & {0, 1}]
    factor, inputs = terms(emit.padded(offset, rank - 1), every)
    for term in steps:
        if term not in inputs:
            return None
        inputs.remove(term)
    keys, values_ = _divide(inputs, n)
    queries, rest = _divide(read.others, n)
    spans = {place for term in exponent for place in term.spans()}
    wide = {place for term in keys + queries for place in term.spans()} & set(kept)
    plain = weight == 1.0 and not decays
    tokens = [1, 0]
    options: tuple[Any, ...] = (False, None, "")
    state_order: list[Any]
    along_n: list[Any]
    per_step: list[Any]
    per_rate: list[Any]
    if plain and n not in spans and len(kept) <= 2:  # the decay is one number a head: matrix products carry the scan
        heads = [place for place in kept if place in spans | wide] or (kept[:1] if len(kept) == 2 else [])
        channels = [place for place in kept if place not in heads]
        if len(channels) != 1:
            return None
        head = heads[0] if heads else None
        state_order, operator_ = [1, head, *channels, n], OPS["ssd"]
        options = (False, [-inf, inf], None, None, "")
        x = _lay(emit, values_, [*tokens, head, *channels], shape, factor)
        along_n, per_step, per_rate = [*tokens, head if wide else None, n], [*tokens, head], [head]
    elif len(kept) == 1 and not wide:
        state_order, operator_ = [1, *kept, n], OPS["selective_scan"]
        x = _lay(emit, values_, [*tokens, *kept], shape, factor)
        along_n, per_step, per_rate = [*tokens, n], [*tokens, *kept], [*kept, n]
    else:
        return None
    if x is None:
        return None
    dt = _lay(emit, steps, per_step, shape, 1.0, like=x)
    A = _lay(emit, rates, per_rate, shape, rate, like=x)
    B, C = (_lay(emit, part, along_n, shape, 1.0, like=x) for part in (keys, queries))
    if dt is None or A is None or B is None or C is None:
        return None
    operands: list[Node | None] = [x, dt, A, B, C, None, None, None]
    if operator_ is OPS["selective_scan"]:
        decay = None if plain else _lay(emit, decays, [*tokens, *kept], shape, weight, like=x)
        if decay is None and not plain:
            return None
        operands.append(decay)
    if len({value(v).dtype for v in operands if v is not None}) != 1:
        return None
    if initial is not None:
        aligned = emit.permute(initial, [place - 1 for place in state_order if place is not None])
        initial = emit.reshape(aligned, [1 if place is None else shape[place] for place in state_order])
        initial = _dense(emit, emit.cast(initial, value(x).dtype))
    given = [None if v is None else _dense(emit, v) for v in operands]
    result = emit.call(operator_, *given, initial, None, *options)
    y, last = (emit.call(getitem, result, i) for i in (0, 1))
    y_order = [*tokens, *(place for place in state_order[1:-1] if place is not None)]
    y = emit.reshape(y, [shape[place] for place in y_order])
    y = emit.permute(y, [y_order.index(place) for place in sorted(y_order)])
    target = sorted(y_order)
    for term in rest:
        y = emit.call(aten.mul.Tensor, y, _lay(emit, [term], list(target), shape, 1.0, dense=False))
    if read.scale != 1.0:
        y = emit.call(aten.mul.Tensor, y, read.scale)
    # The contraction's own axes, less those of size one.
    y = emit.reshape(emit.permute(y, _order(read.out, target, shape)), list(value(read.node).shape))
    sizes = [shape[place] for place in state_order if place is not None]
    last = emit.reshape(last, sizes)
    natural = [place for place in state_order if place is not None]
    last = emit.permute(last, [natural.index(place) for place in range(1, rank)])
    return emit.cast(y, value(read.node).dtype), last


def _order(out: tuple[int | None, ...], target: list[int], shape: list[int]) -> list[int]:
    """Return the permutation of ``target`` that puts its axes as ``out`` has them, those of size one first."""
    wanted = [place for place in out if place is not None]
    ones = [place for place in target if place not in wanted]
    return [target.index(place) for place in (*ones, *wanted)]


def _unalias(node: Node) -> Node:
    while node.target in (aten.alias.default, aten.clone.default, aten.expand.default):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _decay(
    node: Any, places: tuple[int | None, ...], n: int
) -> tuple[tuple[float, list[Term]], tuple[float, list[Term]]] | None:
    """Read a decay as exp of a product times factors that do not run along ``n``: (exponent, other factors)."""
    scale, parts = terms(node, places)
    if scale == 1.0 and len(parts) == 1 and (exponent := _exponent(parts[0])) is not None:
        return exponent, (1.0, [])
    powers, others = _divide(parts, n)
    if not powers:
        return (0.0, []), (scale, others)
    exponent = _exponent(powers[0]) if len(powers) == 1 else None
    return None if exponent is None else (exponent, (scale, others))


def _exponent(term: Term) -> tuple[float, list[Term]] | None:
    """Read a factor as exp of a product: (scale, factors of the exponent)."""
    inner = _unalias(term.node)
    if inner.target is not aten.exp.default or value(inner).dim() != len(term.places):
        return None
    return terms(arg(inner, 0), term.places)


def _divide(parts: list[Term], n: int) -> tuple[list[Term], list[Term]]:
    """Split factors into those that run along n and the others."""
    return [term for term in parts if n in term.spans()], [term for term in parts if n not in term.spans()]


def _lay(
    emit: Emitter, parts: list[Term], order: list[int | None], shape: list[int], scale: float,
    like: Node | None = None, dense: bool = True,
) -> Node | None:  # fmt: skip
    """Multiply factors and lay the product out over axes of the states; None in the order is an axis of size one."""
    sizes = [1 if place is None else shape[place] for place in order]
    total: Node | None = None
    for term in parts:
        axes = [i for i, place in enumerate(term.places) if place is not None]
        x = emit.reshape(term.node, [value(term.node).shape[i] for i in axes])
        places = [term.places[i] for i in axes]
        if any(place not in order for place in places):
            return None
        x = emit.permute(x, [places.index(place) for place in order if place in places])
        x = emit.reshape(x, [size if place in places else 1 for place, size in zip(order, sizes, strict=True)])
        total = x if total is None else emit.call(aten.mul.Tensor, total, x)
    if total is None:
        return None if like is None else _constant(emit, like, sizes, scale)
    if scale != 1.0:
        total = emit.call(aten.mul.Tensor, total, scale)
    return emit.expand(total, sizes) if dense else total


def _constant(emit: Emitter, like: Node, sizes: list[int], number: float) -> Node:
    val = value(like)
    return emit.call(aten.full.default, sizes, number, dtype=val.dtype, device=val.device)


def _dense(emit: Emitter, x: Node) -> Node:
    return x if value(x).is_contiguous() else emit.call(aten.clone.default, x, memory_format=torch.contiguous_format)
