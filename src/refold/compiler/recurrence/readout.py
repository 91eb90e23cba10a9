"""How a contraction reads the states of a scan: as one of the factors that it multiplies and sums.

Values are split into factors in index notation, each with the axes of the states that it runs along. States may be read
after their step or before it (``loop.previous``), and other products may be added to them. The sum in ``sum over n of C
* (h + u * B)`` is multiplied out. The terms without the states are kept apart. States that are rounded to 16 bits only
to be contracted are read before that, and the other factors are widened. A mask that all factors of a product run along
chooses each of them.

Shapes. States are (b, t, ...) in the scan, and (t, ...) over all steps of a loop, axis 0 of a state being the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch.fx import Node

from ..ir.builder import Builder
from ..ir.fx import CONVERT, SUMS, arg, factor_of_second, value
from ..ir.index import Factor, Product, contraction, expand, index
from ..ir.symbols import Axis, Label, atoms, resolve
from .segment_sums import filled

aten = torch.ops.aten
T = TypeVar("T")


@dataclass(frozen=True)
class Placed:
    """A factor: a node, and for each of its axes which axis of the states it runs along."""

    node: Node
    state_axes: tuple[int | None, ...]

    def spans(self) -> set[int]:
        """Return the axes of the states that it depends on."""
        return {place for place in self.state_axes if place is not None}


def terms(emit: Builder, node: Node, state_axes: tuple[int | None, ...]) -> tuple[float, list[Placed]]:
    """Split a value into factors as far as index notation sees them; (scale, factors).

    Index notation takes a product of two dtypes as it is. Here each side is split, and its factors are widened.
    """
    if (split := filled(node, 0.0) if node.target is aten.where.self else None) is not None:
        return _chosen(emit, node, *split, state_axes)
    if not _is_mixed(node):
        return _split(emit, index(node), node, state_axes)
    scale, found = 1.0, list[Placed]()
    for side in node.all_input_nodes:
        number, parts = terms(emit, side, _own_axes(side, state_axes))
        scale, found = scale * number, found + [_cast(emit, term, value(node).dtype) for term in parts]
    return scale, found


def _chosen(
    emit: Builder, node: Node, kept: Node, keeps: bool, state_axes: tuple[int | None, ...]
) -> tuple[float, list[Placed]]:
    """Let a mask choose between zero and each factor of a value, so that no NaN is multiplied where it says no."""
    scale, found = terms(emit, kept, state_axes)
    mask = Placed(arg(node, 0), _own_axes(arg(node, 0), state_axes))
    if len(found) < 2 or not all(mask.spans() <= term.spans() for term in found):
        return 1.0, [Placed(node, state_axes)]
    chosen = list[Placed]()
    for term in found:
        x = along(emit, term, state_axes)
        sides = (x, emit.full(0.0, x))
        x = emit.call(aten.where.self, mask.node, *(sides if keeps else sides[::-1]))
        chosen.append(Placed(x, _own_axes(x, state_axes)))
    return scale, chosen


def along(emit: Builder, term: Placed, order: Sequence[int | None]) -> Node:
    """Lay a factor out over axes of the states, among them all of its own; it has size one along the others."""
    sizes = {place: n for place, n in zip(term.state_axes, value(term.node).shape, strict=True) if place is not None}
    x = emit.reshape(term.node, [*sizes.values()])
    x = emit.permute(x, [[*sizes].index(place) for place in order if place in sizes])
    return emit.reshape(x, [1 if place is None else sizes.get(place, 1) for place in order])


def _is_mixed(node: Node) -> bool:
    """Tell whether a node multiplies a tensor by another one, of a narrower type."""
    if node.target is not aten.mul.Tensor or len(node.all_input_nodes) != 2:
        return False
    kinds = {value(side).dtype for side in node.all_input_nodes}
    return len(kinds) == 2 and value(node).dtype == torch.float32


def _own_axes(side: Node, state_axes: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """Return which axis of the states each axis of an operand is that is broadcast; one of size one is none."""
    shape = value(side).shape
    own = state_axes[len(state_axes) - len(shape) :]
    return tuple(place if size != 1 else None for place, size in zip(own, shape, strict=True))


def _cast(emit: Builder, term: Placed, dtype: torch.dtype) -> Placed:
    return Placed(emit.cast(term.node, dtype), term.state_axes)


def _split(
    emit: Builder, product: Product, node: Node, state_axes: tuple[int | None, ...]
) -> tuple[float, list[Placed]]:
    whole, where = (1.0, [Placed(node, state_axes)]), _places(product.labels, state_axes)
    if where is None:
        return whole
    scale = product.scale
    found: list[Placed] = []
    for factor in product.factors:
        placed = _factor_terms(emit, factor, where, node)
        if placed is None:
            return whole
        scale, found = scale * placed[0], found + placed[1]
    return scale, found


def _places(labels: Sequence[Label], state_axes: Sequence[T]) -> dict[Axis, T] | None:
    """Return which axis of the states each symbol runs along; None if one axis has several symbols."""
    if any(len(resolve(label)) > 1 for label in labels):
        return None
    return {axis: place for label, place in zip(labels, state_axes, strict=True) for axis in resolve(label)}


def _factor_terms(
    emit: Builder, factor: Factor, where: Mapping[Any, int | None], within: Node | None = None
) -> tuple[float, list[Placed]] | None:
    """Split a factor further, given where its symbols run; None if it cannot be laid along axes of the states."""
    axes = factor.axes()
    if factor.pending or any(axis not in where for axis in axes):
        return None
    if any(len(resolve(label)) > 1 for label in factor.labels):  # a matrix product leaves batch and time as one axis
        split = emit.reshape(factor.node, [int(axis.size) for axis in axes])
        return 1.0, [Placed(split, tuple(where[axis] for axis in axes))]
    state_axes = tuple(where[label[0]] if (label := resolve(own)) else None for own in factor.labels)
    return (1.0, [Placed(factor.node, state_axes)]) if factor.node is within else terms(emit, factor.node, state_axes)


@dataclass(frozen=True)
class Readout:
    """How ``y`` reads the states.

    Attributes:
        node: ``y``.
        summed: The axis of the states that is summed.
        scale: A number that the product has as a factor.
        others: The other factors.
        out: Which axis of the states each axis of ``y`` is.
        exclusive: Whether it reads each step's state before the step.
        extra_terms: Products of no state that are summed as well, each a number and factors.
    """

    node: Node
    summed: int
    scale: float
    others: list[Placed]
    out: tuple[int | None, ...]
    exclusive: bool
    extra_terms: list[tuple[float, list[Placed]]]

    def with_batch(self) -> Readout:
        """Return the same of states that have one more axis, of size one: a batch, after time."""
        return replace(
            self,
            summed=self.summed + 1,
            others=_with_batch(self.others),
            out=_later(self.out),
            extra_terms=[(scale, _with_batch(factors)) for scale, factors in self.extra_terms],
        )


def _with_batch(factors: list[Placed]) -> list[Placed]:
    return [Placed(term.node, _later(term.state_axes)) for term in factors]


def _later(places: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """Return axes of the states, counted with one more after time."""
    return tuple(place + 1 if place else place for place in places)


@dataclass(frozen=True)
class ScanStates:
    """Where the states of a scan are in a graph.

    Attributes:
        after: The scan's result, (batch, time, ...).
        before: The states before each step, (time, batch, ...).
        shape: (time, batch, ...).
        dependent: All nodes that depend on the scan.
    """

    after: Node
    before: Node | None
    shape: list[int]
    dependent: Set[Node]

    def state_axes(self, node: Node) -> tuple[int, ...] | None:
        """Return which axis of the states each axis of a node is, if the node is the states or a sum with them."""
        rank = len(self.shape)
        if node is self.after:
            return (1, 0, *range(2, rank))
        if node is self.before or (node.target in SUMS and list(value(node).shape) == self.shape):
            return tuple(range(rank))
        return None

    def without_ones(self, node: Node) -> tuple[int | None, ...]:
        """Do the same as factors have it: an axis of size one runs along none."""
        return tuple(place if self.shape[place] != 1 else None for place in self.state_axes(node) or ())


def find_readout(emit: Builder, node: Node, states: ScanStates) -> Readout | None:
    """Read a contraction of each step's state; None if it is none, or reads them otherwise."""
    product = contraction(node)
    if product is None:
        return None
    whole = expand(product, lambda factor: _before_rounding(factor) if factor in states.dependent else None)
    rounded, product = whole.through != product.through, whole
    holding = [factor for factor in product.factors if factor.node in states.dependent]
    if len(holding) != 1:
        return None
    (mine,) = holding
    state_axes = states.state_axes(mine.node)
    if state_axes is None or mine.pending:
        return None
    where = _places(mine.labels, state_axes)
    if where is None:
        return None
    bound = resolve(product.bound)
    kept = atoms(product.labels)
    if len(bound) != 1 or any(axis not in where for axis in (*bound, *kept)) or where[bound[0]] == 0:
        return None  # a sum over time is not one of each state
    scale, others = product.scale, list[Placed]()
    for factor in product.factors:
        if factor is mine:
            continue
        placed = _factor_terms(emit, factor, where)
        if placed is None:
            return None
        scale, others = scale * placed[0], others + placed[1]
    if rounded:
        others = [_cast(emit, term, value(mine.node).dtype) for term in others]
    found = _multiplied_out(emit, scale, [Placed(mine.node, state_axes), *others], states)
    held = [product for product in found or [] if any(term.node in states.dependent for term in product[1])]
    if found is None or len(held) != 1:
        return None
    (scale, factors), besides = held[0], [product for product in found if product is not held[0]]
    (own,) = (term for term in factors if term.node in states.dependent)
    if own.state_axes != states.without_ones(own.node) and own.node is not mine.node:
        return None
    others = [term for term in factors if term is not own]
    out = tuple(where[axis] for axis in kept)
    return Readout(node, where[bound[0]], scale, others, out, own.node is states.before, besides)


def _before_rounding(node: Node) -> Product | None:
    """Read what was rounded to 16 bits before it is contracted: an operator's states stay in float32."""
    if node.target is not CONVERT or value(node).dtype not in (torch.bfloat16, torch.float16):
        return None
    wide: Any = node.args[0]
    if value(wide).dtype != torch.float32:
        return None
    inner = index(wide)
    return replace(inner, through=(*inner.through, node))


def _multiplied_out(
    emit: Builder, scale: float, factors: list[Placed], states: ScanStates
) -> list[tuple[float, list[Placed]]] | None:
    """Turn a product of sums that hold the states into a sum of products."""
    total = next((term for term in factors if term.node in states.dependent and term.node.target in SUMS), None)
    if total is None:
        return [(scale, factors)]
    sides, others = total.node.args, [term for term in factors if term is not total]
    if total.node.kwargs or not all(isinstance(side, Node) for side in sides):
        return None
    products: list[tuple[float, list[Placed]]] = []
    for side, sign in zip(sides, (1.0, factor_of_second(total.node)), strict=True):
        assert isinstance(side, Node)
        number, parts = terms(emit, side, _own_axes(side, total.state_axes))
        found = _multiplied_out(emit, scale * sign * number, parts + others, states)
        if found is None:
            return None
        products += found
    return products
