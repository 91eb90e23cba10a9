"""Carries that a step maps by a diagonal plus a matrix of rank one: the delta rule, with or without decay.

    S <- D S;    S <- S + k (b x - b Sᵀ r)ᵀ;    o = Sᵀ q

A step's new state is read as a sum of products in index notation, so the spelling does not matter. It is this map if
one product is the decayed state, one contracts the state along the keys, and all others hold no state. States are not
written: all that reads them must contract them, after the step. Two things may be otherwise, as in RWKV-7: what is
contracted may be the state before its decay, and x may be written under other keys than what was read. The map may be
one matrix, S (D - b r kᵀ), if D is known to be diagonal. A step may be several such maps, one after the other
(DeltaProduct). Where a mask says so, a step may leave the state as it is.

Shapes. A state has axes in any order: those of the keys (n), of the values (p), which only x runs along, and others.
Source: Yang, Kautz & Hatamizadeh 2024 (arXiv:2412.06464), section 3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from ..ir.builder import downstream
from ..ir.fx import CASTS, SUMS, factor_of_second, is_tensor, value
from ..ir.index import Factor, Product, contraction, expand, index, leaf, read_further
from ..ir.symbols import Label, atoms, resolve, unify

aten = torch.ops.aten

IDENTITY = "identity"
"""In the metadata of what a step reads: that it is an identity matrix, or a batch of these."""

_COPIES = (aten.clone.default, aten.alias.default)
_WRITTEN = -1
"""The axis of the write keys in a product that contracts the state: that of the read keys is n."""
_DEPTH = 16
"""Sums within one another that are multiplied out at most."""


class _Other(Exception):
    """A step does something else."""


@dataclass(frozen=True)
class FactorOfStep:
    """A factor of a step's product.

    Attributes:
        node: The factor.
        places: Which axis of the state each of its axes of more than one element runs along.
        key: The same for equal values.
    """

    node: Node = field(compare=False)
    places: tuple[int, ...]
    key: str


@dataclass(frozen=True)
class Weighted:
    """A number times factors."""

    number: float
    parts: tuple[FactorOfStep, ...]

    def along(self, place: int) -> list[FactorOfStep]:
        """Return the factors that run along an axis of the state."""
        return [part for part in self.parts if place in part.places]

    def holds(self, parts: Iterable[FactorOfStep]) -> bool:
        """Tell whether it has factors."""
        return Counter(parts) <= Counter(self.parts)

    def without(self, parts: Iterable[FactorOfStep]) -> Weighted:
        """Leave factors out.

        Raises:
            _Other: It does not have them.
        """
        left = Counter(self.parts)
        left.subtract(parts)
        if min(left.values(), default=0) < 0:
            raise _Other
        return Weighted(self.number, tuple(left.elements()))


@dataclass(frozen=True)
class Query:
    """A node that contracts each step's new state.

    Attributes:
        node: The node.
        factors: What the state is multiplied by.
        out: Which axis of the state each of its axes of more than one element is; merged ones are apart.
    """

    node: Node
    factors: Weighted
    out: tuple[int, ...]


@dataclass(frozen=True)
class RankOne:
    """A step that is the delta rule.

    Attributes:
        state: The old state.
        new: The new one.
        n: The axis of the keys.
        p: That of the values; None if there is none.
        decay: D.
        keys: k.
        reads: r, and what multiplies it but not x.
        beta: b.
        inputs: The summands of x.
        queries: What contracts the new states.
        early: Whether r reads the state before it decays.
        under: The keys that x is written under; None if they are k.
        earlier: The delta rules of the step before this one, which reads what they leave.
        mask: A mask, and whether steps are taken where it is true, or where it is false; None if all are.
    """

    state: Node
    new: Node
    n: int
    p: int | None
    decay: Weighted
    keys: Weighted
    reads: Weighted
    beta: Weighted
    inputs: tuple[Weighted, ...]
    queries: tuple[Query, ...] = ()
    early: bool = False
    under: Weighted | None = None
    earlier: tuple[RankOne, ...] = ()
    mask: tuple[Weighted, bool] | None = None

    @property
    def rules(self) -> tuple[RankOne, ...]:
        """The delta rules of a step, in order."""
        return (*self.earlier, self)

    @property
    def others(self) -> list[int]:
        """The axes of batch and heads."""
        return [place for place in range(value(self.state).dim()) if place not in (self.n, self.p)]


def read_rank_one(graph: Graph, state: Node, new: Node) -> RankOne | None:
    """Read a step's new state as the delta rule of its old one; None if it is something else."""
    new = _original(new)
    alike = is_tensor(state) and is_tensor(new) and value(new).shape == value(state).shape
    if not (alike and value(new).is_floating_point()):
        return None
    try:
        values, dependent = _Values(graph), downstream(state)
        inner, mask = _unmasked(values, state, new, dependent)
        step = _read(values, state, inner, dependent) or _in_a_row(values, graph, state, inner)
        step = replace(step, new=new, mask=mask, earlier=tuple(replace(rule, mask=mask) for rule in step.earlier))
        queries, hidden = list[Query](), downstream(new) - {new}
        for node in graph.nodes:
            if node in hidden and (query := _query(values, node, new, step.n)) is not None:
                queries.append(query)
                hidden -= downstream(node)
        return _with_values(replace(step, queries=tuple(queries)))
    except _Other:
        return None


def _original(node: Any) -> Any:
    """Follow a node through copies."""
    while isinstance(node, Node) and node.target in _COPIES:
        node = node.args[0]
    return node


def _unmasked(
    values: _Values, state: Node, new: Node, dependent: set[Node]
) -> tuple[Node, tuple[Weighted, bool] | None]:
    """Read what a mask chooses where it does not keep the state, and the mask; all of a step that has none."""
    if new.target is not aten.where.self:
        return new, None
    mask, *sides = map(_original, new.args)
    if state not in sides or mask in dependent or value(mask).dtype != torch.bool:
        raise _Other
    taken = sides[0] is not state
    inner = sides[0 if taken else 1]
    while mask.target in (aten.bitwise_not.default, aten.logical_not.default):
        mask, taken = _original(mask.args[0]), not taken
    chosen = index(mask)
    labels = enumerate(map(resolve, chosen.labels), value(state).dim() - len(chosen.labels))
    where = {axis: place for place, label in labels for axis in label}
    if not is_tensor(inner) or value(inner).dtype != value(new).dtype or len(set(where.values())) < len(where):
        raise _Other
    return inner, (values.parts(chosen, None, where), taken)


def _read(values: _Values, state: Node, new: Node, dependent: set[Node]) -> RankOne | None:
    """Read one delta rule, from a state to another; None if it is something else."""
    whole = leaf(new)
    try:
        return _step(values, state, new, whole, list(_multiplied_out(whole, state, dependent)))
    except _Other:
        return None


def _in_a_row(values: _Values, graph: Graph, state: Node, new: Node) -> RankOne:
    """Read a step as several delta rules, each of what the one before it leaves."""
    rules, start, dependent = list[RankOne](), state, downstream(state)
    for node in graph.nodes:
        between = node is new or (node in dependent and node.target in SUMS)
        if not between or value(node).shape != value(state).shape:
            continue
        rule = _read(values, start, node, dependent)
        if rule is not None and not rule.early and rule.under is None:
            rules.append(rule)
            start = node
    if not rules or start is not new or len({rule.n for rule in rules}) > 1:
        raise _Other
    return replace(rules[-1], state=state, earlier=tuple(rules[:-1]))


def _step(values: _Values, state: Node, new: Node, whole: Product, products: list[Product]) -> RankOne:
    """Read a step, given its new state and the products that this is the sum of."""
    rows = [resolve(label) for label in whole.labels]
    if any(len(row) > 1 for row in rows):
        raise _Other
    holding = [product for product in products if any(factor.node is state for factor in product.factors)]
    decaying = [product for product in holding if not product.bound]
    if len(decaying) != 1 or len(holding) != 2 or len(products) < 3:
        raise _Other
    decay, _ = values.weighted(decaying[0], state, rows)
    erased, n = values.weighted(next(product for product in holding if product.bound), state, rows)
    inputs = [values.weighted(product, None, rows)[0] for product in products if product not in holding]
    if n is None or not decay.number > 0:
        raise _Other
    early = not erased.holds(decay.parts)
    reads, number = (erased, erased.number) if early else (erased.without(decay.parts), erased.number / decay.number)
    written = reads.along(_WRITTEN)
    reads = replace(reads.without(written), number=-number)
    keys = [replace(part, places=tuple(n if x == _WRITTEN else x for x in part.places)) for part in written]
    under = inputs[0].along(n)
    if not (keys and under and reads.along(n)) or any(Counter(term.along(n)) != Counter(under) for term in inputs):
        raise _Other
    if any(len(set(part.places)) != len(part.places) for part in keys):
        raise _Other  # one matrix in place of two keys
    apart = Counter(under) != Counter(keys)
    inputs = [term.without(under) for term in inputs]
    common = Counter(part for part in reads.parts if n not in part.places and not apart)
    for term in inputs:
        common &= Counter(term.parts)
    beta = Weighted(1.0, tuple(common.elements()))
    inputs = [term.without(beta.parts) for term in inputs]
    return RankOne(
        state, new, n, None, decay, Weighted(1.0, tuple(keys)), reads.without(beta.parts), beta, tuple(inputs),
        early=early, under=Weighted(1.0, tuple(under)) if apart else None,
    )  # fmt: skip


def _with_values(step: RankOne) -> RankOne:
    """Choose the axis of the values: all but inputs are the same along it."""
    keys = (*(rule.keys for rule in step.rules), *filter(None, [step.under]))
    read = [term for rule in step.rules for term in (rule.decay, rule.reads, rule.beta)]
    if step.mask is not None:
        read.append(step.mask[0])
        if step.mask[0].along(step.n):
            raise _Other  # another decay for each key
    read += [*keys, *(query.factors for query in step.queries)]
    inputs = [term for rule in step.rules for term in rule.inputs]
    used, written = ({x for term in terms for part in term.parts for x in part.places} for terms in (read, inputs))
    free = [place for place in range(value(step.state).dim()) if place not in used]
    p = max(free, key=lambda place: (place in written, place), default=None)
    found = replace(step, p=p, earlier=tuple(replace(rule, p=p) for rule in step.earlier))
    if p is None and not all(key.along(place) for key in keys for place in found.others):
        raise _Other  # keys would have to be repeated for each value
    return found


def _multiplied_out(product: Product, state: Node, dependent: set[Node], depth: int = 0) -> Iterator[Product]:
    """Yield products, whose sum is the given one, that hold the state as itself, or no value that depends on it."""

    def opened(node: Node) -> Product | None:
        held = node is state or (node in dependent and node.target in SUMS)
        return None if held else read_further(node, node in dependent)

    product = _without_diagonals(expand(product, opened))
    held = [factor for factor in product.factors if factor.node in dependent]
    totals = [factor for factor in held if factor.node is not state] or [*filter(_adds_a_diagonal, product.factors)]
    if not totals:
        yield product
        return
    total = totals[0]
    if len(held) > 1 or total.pending or total.node.target not in SUMS or depth == _DEPTH:
        raise _Other
    sides, rest = total.node.args[:2], tuple(factor for factor in product.factors if factor is not total)
    if not isinstance(total.node.kwargs.get("alpha", 1), int | float):
        raise _Other
    for side, scale in zip(sides, (1.0, factor_of_second(total.node)), strict=True):
        if not (isinstance(side, Node) and is_tensor(side) and value(side).dtype == value(total.node).dtype):
            raise _Other
        one = leaf(side)
        own = total.labels[len(total.labels) - len(one.labels) :]
        if not all(unify(x, y) for x, y in zip(one.labels, own, strict=True) if x):
            raise _Other
        term = replace(product, factors=one.factors + rest, scale=product.scale * scale)
        yield from _multiplied_out(term, state, dependent, depth + 1)


def _adds_a_diagonal(factor: Factor) -> bool:
    """Tell whether a factor is the sum of a diagonal matrix and something."""
    sides = factor.node.args[:2] if factor.node.target in SUMS else ()
    products = [index(side) for side in sides if isinstance(side, Node) and is_tensor(side)]
    return any(_diagonal(part) is not None for product in products for part in product.factors)


def _diagonal(factor: Factor) -> tuple[Factor, ...] | None:
    """Return a diagonal matrix as the factors of its diagonal, at its rows; None if it may be another matrix."""
    node = factor.node
    if node.target is aten.diag_embed.default and len(node.args) == 1 and not node.kwargs:
        return (Factor(node.args[0], factor.labels[:-1]),)  # type: ignore[arg-type]
    while node.target in CASTS:
        node = node.args[0]  # type: ignore[assignment]
    return () if IDENTITY in node.meta or node.target is aten.eye.default else None


def _without_diagonals(product: Product) -> Product:
    """Sum over the rows, or the columns, of diagonal matrices: all else is read at the others."""
    for factor in product.factors:
        diagonal, bound = _diagonal(factor), resolve(product.bound)
        if diagonal is None:
            continue
        row, column = (resolve(label) for label in factor.labels[-2:])
        if len(row) != 1 or len(column) != 1 or factor.pending:
            raise _Other
        (gone,), (kept,) = (row, column) if row[0] in bound else (column, row)
        if gone not in bound:
            raise _Other
        rest = [part for part in product.factors if part is not factor]
        parts = tuple(
            replace(part, labels=tuple(tuple(kept if x == gone else x for x in resolve(y)) for y in part.labels))
            for part in (*rest, *diagonal)
        )
        return _without_diagonals(replace(product, factors=parts, bound=tuple(x for x in bound if x != gone)))
    return product


class _Values:
    """Tells which values of a step are equal."""

    def __init__(self, graph: Graph) -> None:
        """Name each node as the first one that computes the same of the same."""
        self._keys: dict[Node, str] = {}
        calls: dict[str, str] = {}
        for node in graph.nodes:
            call = str((node.target, torch.fx.node.map_arg((node.args, node.kwargs), self._keys.__getitem__)))
            self._keys[node] = calls.setdefault(call, node.name) if node.op == "call_function" else node.name

    def weighted(self, product: Product, state: Node | None, rows: Sequence[Label]) -> tuple[Weighted, int | None]:
        """Return a product without the state, and the axis that it is summed along, if it is.

        Args:
            product: The product.
            state: The state that it holds; None if it holds none.
            rows: The new state's axes.
        """
        where = {row[0]: place for place, row in enumerate(rows) if row}
        if state is None:
            if product.bound:
                raise _Other
            return self.parts(product, None, where), None
        held = [factor for factor in product.factors if factor.node is state]
        bound, labels = resolve(product.bound), [resolve(label) for label in held[0].labels]
        summed = [place for place, (x, y) in enumerate(zip(labels, rows, strict=True)) if x != y]
        if len(held) > 1 or held[0].pending or [labels[place] for place in summed] != [(axis,) for axis in bound]:
            raise _Other
        if len(summed) > 1 or any(not rows[place] for place in summed):
            raise _Other
        for place in summed:
            where |= {rows[place][0]: _WRITTEN, bound[0]: place}
        return self.parts(product, held[0], where), next(iter(summed), None)

    def parts(self, product: Product, but: Factor | None, where: dict[Any, int]) -> Weighted:
        """Return a product without one of its factors, given which axis of the state each symbol is."""
        found = []
        for factor in product.factors:
            if factor is but:
                continue
            places = [where.get(axis) for axis in factor.axes()]
            if factor.pending or None in places or len(set(places)) != len(places):
                raise _Other
            found.append(FactorOfStep(factor.node, tuple(places), self._keys[factor.node]))  # type: ignore[arg-type]
        return Weighted(product.scale, tuple(found))


def _query(values: _Values, node: Node, new: Node, n: int) -> Query | None:
    """Read a node as a contraction of a step's new state along its keys; None if it is none."""
    product = contraction(node)
    try:
        products = list(_multiplied_out(product, new, downstream(new))) if product is not None else []
        held = [factor for product in products for factor in product.factors if factor.node is new]
        if len(products) != 1 or len(held) != 1 or held[0].pending:
            return None
        (product,) = products
        labels = [resolve(label) for label in held[0].labels]
        if any(len(label) > 1 for label in labels) or not labels[n] or resolve(product.bound) != labels[n]:
            return None
        where = {label[0]: place for place, label in enumerate(labels) if label}
        out = [where.get(axis) for axis in atoms(product.labels)]
        if None in out:
            return None
        return Query(node, values.parts(product, held[0], where), tuple(out))  # type: ignore[arg-type]
    except _Other:
        return None
