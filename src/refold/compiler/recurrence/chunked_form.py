"""Read a scan that was written in chunks.

State space dual code cuts time into chunks and adds up two products (Dao & Gu 2024, listing 1):

    within a chunk    Y[c,i]  = sum over j <= i of (C[c,i] . B[c,j]) exp(S[j,i]) X[c,j]
    between chunks    Y[c,i] += exp(S[start,i]) C[c,i] . H[c]

``S`` are sums of one log decay ``a`` between two positions. ``H[c]`` is the state that enters chunk ``c``. It is a
product, too: decays between chunks times what each chunk adds to the state,

    sum over j of exp(S[j,end]) B[c,j] X[c,j],        the first of them being the initial state.

That is ``H <- exp(a) H + X B`` and ``y = C . H`` at every token: `refold.ops.ssd`. Both products are read in index
notation down to their last factors, so any order and spelling of the products looks the same. They are the same scan
only if B, C, X and the source of all five decays are the same nodes at the same symbols. Chunks that were padded to
their length are read without the padding.

Shapes. X is (b, c, l, h, p), B and C are (b, c, l, g, n), and a is (b, c, l, h): c chunks of l tokens. Axes may be in
another order, split or merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from ..ir.fx import arg, is_zero, value
from ..ir.index import Factor, Product, expand, index, padding
from ..ir.moves import Slice, read
from ..ir.symbols import Axis, Label, atoms, resolve, unify
from .segment_sums import Segments, decay, pair, same_source, segments, unify_all

aten = torch.ops.aten


class NotAScan(Exception):
    """The products are no scan, or one that the operator cannot express."""


@dataclass
class ChunkStates:
    """The states between chunks, ``H[c+1] = exp(S[start,end]) H[c] + sum over j of exp(S[j,end]) written[c,j]``.

    Attributes:
        node: Holds the state that enters each chunk, and after them the last state.
        layout: Its axes.
        dim: Its axis that counts chunks.
        chunk: The symbols that count chunks in ``end`` and ``written``.
        end: The decay from each position of a chunk to its end.
        written: B and X.
        initial: The initial state; None for zeros.
    """

    node: Node
    layout: Product
    dim: int
    chunk: Label
    end: Segments
    written: Product
    initial: Factor | None

    def lasts(self) -> list[Node]:
        """Return the nodes that read the state after the last chunk."""
        rank, size = value(self.node).dim(), value(self.node).shape[self.dim]
        reads = [node for node in self.node.users if node.target is aten.select.int]
        return [node for node in reads if arg(node, 1) % rank == self.dim and arg(node, 2) in (-1, size - 1)]


@dataclass
class ScanForm:
    """``H <- exp(decays) H + written``, ``y = queries . H``, as factors at common symbols.

    Attributes:
        y: The layout of the outputs.
        states: What is known of the states between chunks; None if nothing is cut, and the first is zero.
        decays: The log decay.
        queries: C.
        written: B and X.
        time: The symbols of time in the factors.
        padded: The symbols of time in ``y``: the chunk and the position in it.
        summed: The symbols that the states have and ``y`` has not.
        divisors: What the outputs are divided by.
    """

    y: Product
    states: ChunkStates | None
    decays: Product
    queries: Product
    written: Product
    time: Label
    padded: Label
    summed: Label
    divisors: tuple[Product, ...] = ()


def require(condition: object) -> None:
    """Raise `NotAScan` unless a condition holds."""
    if not condition:
        raise NotAScan


def _only(found: Sequence[Any]) -> Any:
    require(len(found) == 1)
    return found[0]


def _split(product: Product) -> tuple[Segments, list[Factor]]:
    """Read the one factor that is a decay, and keep the other factors."""
    found = [(factor, read) for factor in product.factors if not factor.pending and (read := decay(factor.node))]
    factor, read = _only(found)
    require(unify_all(read.labels, factor.labels))
    return read, [other for other in product.factors if other is not factor]


def _known(label: Label | None) -> Label:
    if not label:
        raise NotAScan
    return resolve(label)


def read_scan(within: Node, across: Node) -> ScanForm:
    """Read both products, or raise `NotAScan`."""
    diagonal = expand(index(within))
    pairs, rest = _split(diagonal)
    require(pairs.causal)
    upto, after = _known(pairs.upto), _known(pairs.after)
    queries = [factor for factor in rest if set(upto) & set(factor.axes())]
    written = [factor for factor in rest if not set(upto) & set(factor.axes())]
    require(queries and all(set(after) & set(factor.axes()) for factor in written))

    carried = expand(index(across))
    require(unify_all(carried.labels, diagonal.labels))
    start, rest = _split(carried)
    require(start.after is None and not start.causal)
    entering = _only([factor for factor in rest if factor.node not in {query.node for query in queries}])
    require(unify(_known(start.upto), upto) and same_source(start, pairs))
    require(pair(queries, [factor for factor in rest if factor is not entering]))

    node, dim = _all_but_last(entering)
    states = read_states(node, dim)
    require(unify_all(states.layout.labels, entering.labels, but=dim) and unify(states.chunk, entering.labels[dim]))
    require(unify(_known(states.end.after), after) and same_source(states.end, pairs))
    require(pair(written, states.written.factors))
    require(diagonal.scale == carried.scale * states.written.scale)

    time = resolve((*states.chunk, *upto))
    scan = ScanForm(
        y=diagonal,
        states=states,
        decays=pairs.source,
        queries=Product((), tuple(queries), carried.scale),
        written=replace(states.written, factors=tuple(written)),
        time=time,
        padded=time,
        summed=carried.bound,
    )
    require(pairs.step and set(resolve(diagonal.bound)) == set(resolve((*after, *carried.bound))))
    check_symbols(diagonal, states.chunk, pairs, carried.bound, (scan.decays.factors, queries, scan.written.factors))
    _drop_padding(scan, states.chunk, pairs)
    return scan


def read_states(node: Node, dim: int) -> ChunkStates:
    """Read the states before all chunks and after the last, or raise `NotAScan`."""
    layout = expand(index(node))
    jump, rest = _split(layout)
    require(layout.scale == 1.0 and jump.causal and _known(jump.upto) == resolve(layout.labels[dim]))
    require(set(_known(jump.after)) == set(resolve(layout.bound)))
    joined = _only(rest)
    initial, added, axis = _joined(joined, _known(jump.after))

    local = expand(index(added))
    chunk = local.labels[axis]
    require(unify_all(local.labels, joined.labels, but=axis))
    end, rest = _split(local)
    require(end.upto is None and not end.causal and same_source(_totals(jump, chunk), end))
    require(set(_known(end.after)) == set(resolve(local.bound)))
    first = None if is_zero(initial) else Factor(initial, with_label(joined.labels, axis, ()))
    return ChunkStates(node, layout, dim, chunk, end, Product((), tuple(rest), local.scale), first)


def _all_but_last(entering: Factor) -> tuple[Node, int]:
    """Read ``states[:, :-1]``: (states, the axis)."""
    node = entering.node
    found = read(node)
    if entering.pending or type(found) is not Slice:
        raise NotAScan
    require((found.start, found.stop, found.step) == (0, found.given[found.dim] - 1, 1))
    return found.of[0], found.dim


def _joined(factor: Factor, place: Label) -> tuple[Node, Node, int]:
    """Read ``cat([initial, added])`` along the axis with these symbols."""
    labels = [resolve(label) for label in factor.labels]
    require(not factor.pending and factor.node.target is aten.cat.default and resolve(place) in labels)
    axis = labels.index(resolve(place))
    parts = arg(factor.node, 0)
    dim = arg(factor.node, 1, "dim", 0) % value(factor.node).dim()
    require(len(parts) == 2 and dim == axis and value(parts[0]).shape[axis] == 1)
    require(all(value(part).dtype == value(factor.node).dtype for part in parts))
    return parts[0], parts[1], axis


def _totals(jump: Segments, chunk: Label) -> Segments:
    """Read the decays between chunks: segment sums over the totals of the chunks, the first being zero."""
    factor = _only(jump.source.factors)
    labels = [resolve(label) for label in factor.labels]
    require(not factor.pending and factor.node.target is aten.constant_pad_nd.default)
    require(resolve(jump.step) in labels)
    dim = labels.index(resolve(jump.step))
    require(padding(factor.node) == {dim: (1, 0)} and not any(factor.node.args[2:]))
    total = segments(arg(factor.node, 0))
    if total is None:
        raise NotAScan
    require(total.upto is None and total.after is None)
    require(unify_all(total.labels, factor.labels, but=dim) and unify(total.labels[dim], chunk))
    return replace(total, source=replace(total.source, scale=total.source.scale * jump.source.scale))


def with_label(labels: tuple[Label, ...], axis: int, label: Label) -> tuple[Label, ...]:
    """Return labels with another one for one axis."""
    return (*labels[:axis], label, *labels[axis + 1 :])


def check_symbols(
    y: Product, chunk: Label, pairs: Segments, summed: Label, factors: Sequence[Sequence[Factor]]
) -> None:
    """Require every symbol to play one part only: where unification had to collapse two, this is no scan.

    The factors are those of decays, of queries, and of what is written.
    """
    out = atoms(y.labels)
    c, i, j, t, n = (set(resolve(label or ())) for label in (chunk, pairs.upto, pairs.after, pairs.step, summed))
    rest = set(out) - c - i
    parts = [c, i, j, t, n, rest]
    require(c | i <= set(out) and len(out) == len(set(out)) and sum(map(len, parts)) == len(set().union(*parts)))
    for given, own in zip(factors, (t, i | n, j | n), strict=True):
        require(all(set(factor.axes()) <= rest | c | own for factor in given))


def _drop_padding(scan: ScanForm, chunk: Label, pairs: Segments) -> None:
    """Read the factors as they were before zeros filled the last chunk; else give all positions one symbol."""
    places = [(scan.decays, pairs.step), (scan.queries, pairs.upto), (scan.written, pairs.after)]
    timed = [(product, resolve((*chunk, *(place or ())))) for product, place in places]
    lengths = {
        length_before_padding(factor, time)
        for product, time in timed
        for factor in product.factors
        if set(time) & set(factor.axes())
    }
    (length, *others) = lengths
    if others or length is None:
        require(unify(pairs.after or (), pairs.upto or ()) and unify(pairs.step, pairs.upto or ()))
        return
    scan.time = (Axis(length),)
    scan.decays, scan.queries, scan.written = (
        expand(replace(product, factors=tuple(before_padding(factor, time, scan.time) for factor in product.factors)))
        for product, time in timed
    )


def length_before_padding(factor: Factor, time: Label) -> int | None:
    """Return how many tokens there were before zeros were put after them; None if that was not done."""
    node = factor.pending[-1].node if factor.pending else factor.node
    if node.target is not aten.constant_pad_nd.default or any(node.args[2:]):
        return None
    if len(filled := padding(node)) != 1 or (factor.pending and factor.pending[-1].scale != 1.0):
        return None
    ((dim, (before, behind)),) = filled.items()
    place = dict(factor.pending[-1].dims)[dim] if factor.pending else dim
    if before or behind < 0 or resolve(factor.labels[place]) != time:
        return None
    return int(value(node).shape[dim]) - behind


def before_padding(factor: Factor, time: Label, short: Label) -> Factor:
    """Read a factor as it was before zeros were put after it, with other symbols for the tokens."""
    if not set(time) & set(factor.axes()):
        return factor
    labels = tuple(short if resolve(label) == time else label for label in factor.labels)
    return Factor(factor.node, labels, factor.pending[:-1]) if factor.pending else Factor(arg(factor.node, 0), labels)
