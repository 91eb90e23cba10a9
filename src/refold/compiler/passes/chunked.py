"""Recognise a scan that was written in chunks, and hand it to the operator that it is.

State space dual code cuts time into chunks and adds up two products (Dao & Gu 2024, listing 1):

    within a chunk    Y[c,i]  = sum over j <= i of (C[c,i] . B[c,j]) exp(S[j,i]) X[c,j]
    between chunks    Y[c,i] += exp(S[start,i]) C[c,i] . H[c]

where ``S`` are sums of one log decay ``a`` between two positions, and ``H[c]``, the state that enters
chunk ``c``, is itself a product: decays between chunks times what each chunk adds to the state,

    sum over j of exp(S[j,end]) B[c,j] X[c,j],        the first of them being the initial state.

That is ``H <- exp(a) H + X B`` and ``y = C . H`` at every token: `refold.ops.ssd`. Both products are
read in index notation down to their last factors, so that any order and spelling of the products
looks the same, and are the same scan only if B, C, X and the source of all five decays are the same
nodes at the same symbols. Chunks that were padded to their length are read without the padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import inf, prod
from operator import getitem
from typing import Any

import torch
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph, Node

from ...ops.library import OPS
from ..duality import away_from_zero
from ..graph import Builder, Operand, between, lay_out, multiply, operand
from ..index import Axis, Factor, Label, Product, arg, expand, index, is_tensor, layout, resolve, unify, value
from ..rewrite import Rewrite, replace_node
from ..segments import Segments, decay, pair, same_source, segments, unify_all

aten = torch.ops.aten


class NotAScan(Exception):
    """The products are no scan, or one that the operator cannot express."""


@dataclass
class Scan:
    """``H <- exp(decays) H + written``, ``y = queries . H``, as factors at common symbols.

    Attributes:
        y: The layout of the outputs.
        states: The node that holds the state that enters each chunk, and behind them the last state.
        entry: The layout of ``states``.
        dim: The axis of ``states`` that counts chunks.
        decays: The log decay.
        queries: C.
        written: B and X.
        initial: The initial state; None for zeros.
        time: The symbols of time in the factors.
        padded: The symbols of time in ``y``: the chunk and the position in it.
        summed: The symbols that the states have and ``y`` has not.
    """

    y: Product
    states: Node
    entry: Product
    dim: int
    decays: Product
    queries: Product
    written: Product
    initial: Factor | None
    time: Label
    padded: Label
    summed: Label


def fuse_chunked_scans(graph: Graph, wanted: Callable[[str], bool]) -> Iterator[Rewrite]:
    """Replace chunked scans by ``ssd``: their outputs and their last states."""
    if any(str(node.target).startswith("tangents") for node in graph.find_nodes(op="placeholder")):
        return  # the backward reads what this would remove
    for root in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        if not (_is_candidate(root) and wanted(root.name)):
            continue
        a, b = root.all_input_nodes
        for within, across in ((a, b), (b, a)):
            try:
                yield from _replace(root, _match(within, across), wanted)
            except NotAScan:
                continue
            stable_topological_sort(graph)  # the last state may have been read before the outputs
            graph.eliminate_dead_code()
            break


def _is_candidate(root: Node) -> bool:
    return (
        not root.kwargs
        and len(root.all_input_nodes) == 2
        and all(is_tensor(x) and value(x).shape == value(root).shape for x in root.all_input_nodes)
        and value(root).is_floating_point()
        and all(isinstance(size, int) and size for size in value(root).shape)
    )


# Reading -------------------------------------------------------------------------------------


def _require(condition: object) -> None:
    if not condition:
        raise NotAScan


def _only(found: Sequence[Any]) -> Any:
    _require(len(found) == 1)
    return found[0]


def _split(product: Product) -> tuple[Segments, list[Factor]]:
    """Return what the one factor that is a decay means, and the other factors."""
    found = [(factor, read) for factor in product.factors if not factor.steps and (read := decay(factor.node))]
    factor, read = _only(found)
    _require(unify_all(read.labels, factor.labels))
    return read, [other for other in product.factors if other is not factor]


def _known(label: Label | None) -> Label:
    if not label:
        raise NotAScan
    return resolve(label)


def _match(within: Node, across: Node) -> Scan:
    """Read both products, or raise `NotAScan`."""
    diagonal = expand(index(within))
    pairs, rest = _split(diagonal)
    _require(pairs.causal)
    upto, after = _known(pairs.upto), _known(pairs.after)
    queries = [factor for factor in rest if set(upto) & set(factor.axes())]
    written = [factor for factor in rest if not set(upto) & set(factor.axes())]
    _require(queries and all(set(after) & set(factor.axes()) for factor in written))

    carried = expand(index(across))
    _require(unify_all(carried.labels, diagonal.labels))
    start, rest = _split(carried)
    _require(start.after is None and not start.causal)
    entering = _only([factor for factor in rest if factor.node not in {query.node for query in queries}])
    _require(unify(_known(start.upto), upto) and same_source(start, pairs))
    _require(pair(queries, [factor for factor in rest if factor is not entering]))

    states, dim, chunk = _all_but_last(entering)
    passed = expand(index(states))
    _require(unify_all(passed.labels, entering.labels, but=dim))
    jump, rest = _split(passed)
    _require(jump.causal and _known(jump.upto) == resolve(passed.labels[dim]))
    _require(set(_known(jump.after)) == set(resolve(passed.bound)))
    joined = _only(rest)
    initial, added, axis = _joined(joined, _known(jump.after))

    local = expand(index(added))
    _require(unify_all(local.labels, joined.labels, but=axis) and unify(local.labels[axis], chunk))
    end, rest = _split(local)
    _require(end.upto is None and not end.causal)
    _require(unify(_known(end.after), after) and same_source(end, pairs) and pair(written, rest))
    _require(same_source(_totals(jump, chunk), pairs))

    _require(passed.scale == 1.0 and diagonal.scale == carried.scale * local.scale)
    time = (*chunk, *upto)
    scan = Scan(
        y=diagonal,
        states=states,
        entry=passed,
        dim=dim,
        decays=pairs.source,
        queries=Product((), tuple(queries), carried.scale),
        written=Product((), tuple(written), local.scale),
        initial=None if _is_zero(initial) else Factor(initial, _with(joined.labels, axis, ())),
        time=time,
        padded=time,
        summed=carried.bound,
    )
    _check_symbols(scan, chunk, pairs, diagonal.bound, local.bound)
    _drop_padding(scan, chunk, pairs)
    return scan


def _all_but_last(entering: Factor) -> tuple[Node, int, Label]:
    """Read ``states[:, :-1]``: (states, the axis, its symbols)."""
    node = entering.node
    _require(not entering.steps and node.target is aten.slice.Tensor)
    states = arg(node, 0)
    dim = arg(node, 1, "dim", 0) % value(states).dim()
    size = value(states).shape[dim]
    _require(arg(node, 2, "start") in (0, None) and arg(node, 3, "end") in (-1, size - 1))
    _require(arg(node, 4, "step", 1) == 1)
    return states, dim, resolve(entering.labels[dim])


def _joined(factor: Factor, place: Label) -> tuple[Node, Node, int]:
    """Read ``cat([initial, added])`` along the axis with these symbols."""
    labels = [resolve(label) for label in factor.labels]
    _require(not factor.steps and factor.node.target is aten.cat.default and resolve(place) in labels)
    axis = labels.index(resolve(place))
    parts = arg(factor.node, 0)
    dim = arg(factor.node, 1, "dim", 0) % value(factor.node).dim()
    _require(len(parts) == 2 and dim == axis and value(parts[0]).shape[axis] == 1)
    _require(all(value(part).dtype == value(factor.node).dtype for part in parts))
    return parts[0], parts[1], axis


def _totals(jump: Segments, chunk: Label) -> Segments:
    """Read the decays between chunks: segment sums over the totals of the chunks, the first being zero."""
    factor = _only(jump.source.factors)
    labels = [resolve(label) for label in factor.labels]
    _require(jump.source.scale == 1.0 and not factor.steps and factor.node.target is aten.constant_pad_nd.default)
    _require(resolve(jump.step) in labels)
    dim = labels.index(resolve(jump.step))
    _require(_padding(factor.node) == {dim: (1, 0)} and not any(factor.node.args[2:]))
    total = segments(arg(factor.node, 0))
    if total is None:
        raise NotAScan
    _require(total.upto is None and total.after is None)
    _require(unify_all(total.labels, factor.labels, but=dim) and unify(total.labels[dim], chunk))
    return total


def _with(labels: tuple[Label, ...], axis: int, label: Label) -> tuple[Label, ...]:
    return (*labels[:axis], label, *labels[axis + 1 :])


def _padding(node: Node) -> dict[int, tuple[int, int]]:
    pad, rank = arg(node, 1), value(node).dim()
    pairs = {rank - 1 - k: (pad[2 * k], pad[2 * k + 1]) for k in range(len(pad) // 2)}
    return {dim: pair for dim, pair in pairs.items() if pair != (0, 0)}


def _is_zero(node: Node) -> bool:
    return node.target is aten.full.default and arg(node, 1) == 0


def _check_symbols(scan: Scan, chunk: Label, pairs: Segments, within: Label, local: Label) -> None:
    """Require every symbol to play one part only: where unification had to collapse two, this is no scan."""
    out = layout(scan.y)
    c, i, j, t = (set(resolve(label or ())) for label in (chunk, pairs.upto, pairs.after, pairs.step))
    n = set(resolve(scan.summed))
    _require(i and j and t and set(resolve(local)) == j and set(resolve(within)) == j | n)
    rest = set(out) - c - i
    parts = [c, i, j, t, n, rest]
    _require(c <= set(out) and len(out) == len(set(out)) and sum(map(len, parts)) == len(set().union(*parts)))
    for product, own in ((scan.decays, t), (scan.queries, i | n), (scan.written, j | n)):
        _require(all(set(factor.axes()) <= rest | c | own for factor in product.factors))


def _drop_padding(scan: Scan, chunk: Label, pairs: Segments) -> None:
    """Read the factors as they were before zeros filled the last chunk; else give all positions one symbol."""
    places = [(scan.decays, pairs.step), (scan.queries, pairs.upto), (scan.written, pairs.after)]
    timed = [(product, resolve((*chunk, *(place or ())))) for product, place in places]
    lengths = {
        _length_before_padding(factor, time)
        for product, time in timed
        for factor in product.factors
        if set(time) & set(factor.axes())
    }
    (length, *others) = lengths
    if others or length is None:
        _require(unify(pairs.after or (), pairs.upto or ()) and unify(pairs.step, pairs.upto or ()))
        return
    scan.time = (Axis(length),)
    scan.decays, scan.queries, scan.written = (
        expand(replace(product, factors=tuple(_before_padding(factor, time, scan.time) for factor in product.factors)))
        for product, time in timed
    )


def _length_before_padding(factor: Factor, time: Label) -> int | None:
    """Return how many tokens there were before zeros were put behind them; None if that was not done."""
    node = factor.steps[-1].node if factor.steps else factor.node
    if node.target is not aten.constant_pad_nd.default or any(node.args[2:]):
        return None
    if len(padding := _padding(node)) != 1 or (factor.steps and factor.steps[-1].scale != 1.0):
        return None
    ((dim, (before, behind)),) = padding.items()
    place = dict(factor.steps[-1].dims)[dim] if factor.steps else dim
    if before or behind < 0 or resolve(factor.labels[place]) != time:
        return None
    return int(value(node).shape[dim]) - behind


def _before_padding(factor: Factor, time: Label, short: Label) -> Factor:
    if not set(time) & set(factor.axes()):
        return factor
    labels = tuple(short if resolve(label) == time else label for label in factor.labels)
    return Factor(factor.node, labels, factor.steps[:-1]) if factor.steps else Factor(arg(factor.node, 0), labels)


# Writing -------------------------------------------------------------------------------------


@dataclass
class _Operands:
    """The factors of each of the operator's arguments."""

    x: list[Factor]
    dt: list[Factor]
    A: list[Factor]
    B: list[Factor]
    C: list[Factor]
    free: bool = False
    """Whether x has no step size in common with the decay: ``dt`` is the log decay, and x is to be divided by it."""


def _operands(scan: Scan) -> _Operands:
    """Divide the factors among the arguments, taking the step size out of the log decay if x has it, too."""
    time, summed = set(resolve(scan.time)), set(resolve(scan.summed))
    steps = [factor for factor in scan.decays.factors if time & set(factor.axes())]
    rates = [factor for factor in scan.decays.factors if factor not in steps]
    written = list(scan.written.factors)
    for step in steps:
        same = [f for f in written if (f.node, f.steps, _axes(f)) == (step.node, step.steps, _axes(step))]
        if not same:
            steps, rates, written = list(scan.decays.factors), [], list(scan.written.factors)
            break
        written.remove(same[0])
    keys = [factor for factor in written if summed & set(factor.axes())]
    values = [factor for factor in written if factor not in keys]
    free = bool(steps) and len(written) == len(scan.written.factors)
    _require(keys and values)
    return _Operands(values, steps, rates, keys, list(scan.queries.factors), free)


def _axes(factor: Factor) -> tuple[Label, ...]:
    return tuple(resolve(label) for label in factor.labels)


def _spanned(factors: Sequence[Factor]) -> set[Axis]:
    return {axis for factor in factors for axis in factor.axes()}


def _replace(root: Node, scan: Scan, wanted: Callable[[str], bool]) -> Iterator[Rewrite]:
    """Emit the operator and replace what it computes."""
    given = _operands(scan)
    factors = [*given.x, *given.dt, *given.A, *given.B, *given.C]
    _require(all(value(factor.node).dtype == value(root).dtype for factor in factors))
    # A reciprocal of a small log decay overflows half precision.
    _require(not (given.free and value(root).dtype == torch.float16))
    outer = [axis for axis in layout(scan.y) if axis not in resolve(scan.padded)]
    read = _spanned([*given.B, *given.C])
    channels = tuple(axis for axis in outer if axis not in read | _spanned([*given.dt, *given.A]))
    # Heads are what rates depend on or what shares B and C, and what lies behind time in memory.
    inputs = max(given.x, key=lambda factor: len(factor.axes())).axes()
    leading = set(inputs[: min((inputs.index(axis) for axis in resolve(scan.time) if axis in inputs), default=0)])
    rest = [axis for axis in outer if axis not in channels]
    batch = tuple(axis for axis in rest if axis in leading & read and axis not in _spanned(given.A))
    grouped = tuple(axis for axis in rest if axis in read and axis not in batch)
    heads = (*grouped, *(axis for axis in rest if axis not in read))

    build = Builder(root)
    time, summed = resolve(scan.time), resolve(scan.summed)
    order = [*batch, *time, *heads, *channels, *summed]
    x, dt, A, B, C = (
        _product(build, factors, scale, order)
        for factors, scale in (
            (given.x, scan.written.scale),
            (given.dt, scan.decays.scale if given.free else 1.0),
            (given.A, 1.0 if given.free else scan.decays.scale),
            (given.B, 1.0),
            (given.C, scan.queries.scale),
        )
    )
    if given.free and dt is not None and x is not None and B is not None:
        dt = Operand(away_from_zero(lambda target, *args, **kwargs: build.call(target, args, kwargs), dt.node), dt.axes)
        if set(dt.axes) <= {*batch, *time, *grouped} and _size(summed) <= _size(channels):
            B = multiply(build, B, dt, order, by=aten.div.Tensor)
        else:
            x = multiply(build, x, dt, order, by=aten.div.Tensor)
    like = value(root)
    arguments = [
        _lay(build, part, groups, number, like)
        for part, groups, number in (
            (x, (batch, time, heads, channels), 1.0),
            (dt, (batch, time, heads), 1.0),
            (A, (heads,), 1.0 if given.free else scan.decays.scale),
            (B, (batch, time, grouped, summed), 1.0),
            (C, (batch, time, grouped, summed), 1.0),
        )
    ]
    initial = None
    if scan.initial is not None:
        initial = _lay(build, operand(build, scan.initial), (batch, heads, channels, summed), 1.0, like)
    options = (False, [-inf, inf], None, None, "")
    result = build.call(OPS["ssd"], (*arguments, None, None, None, initial, None, *options))
    y, last = (build.call(getitem, (result, i)) for i in (0, 1))
    if missing := _size(resolve(scan.padded)) - _size(time):
        y = build.call(aten.constant_pad_nd.default, (y, [0, 0, 0, 0, 0, missing]))
    axes = [*batch, *resolve(scan.padded), *heads, *channels]
    y = lay_out(build, Operand(build.reshape(y, [[axis.size] for axis in axes]), axes), scan.y)
    y = build.restride(y, like)
    lasts = [(node, _lay_last(build, node, last, scan, (*batch, *heads, *channels, *summed))) for node in _lasts(scan)]

    made = set(build.added)
    sources = {x for node in made for x in node.all_input_nodes if x not in made}
    detail = f"{_size(time)} tokens, {_size(heads)} heads of {_size(channels)} x {_size(summed)} as one ssd"
    for old, new in [(root, y), *((node, new) for node, new in lasts if wanted(node.name))]:
        yield replace_node(
            old,
            new,
            inside=between(old, sources),
            added=made,
            name="fuse chunked scan",
            why="decays and products of each chunk are written out and read again",
            detail=detail,
            multilinear=False,
            terms=_size(time),
            raced_alone=old is root,  # the last state falls off while the outputs are computed
            spread=0.1,
        )


def _size(label: Sequence[Axis]) -> int:
    return prod(int(axis.size) for axis in label)


def _product(build: Builder, factors: Sequence[Factor], scale: float, order: Sequence[Axis]) -> Operand | None:
    """Multiply factors; None if there are none."""
    if not factors:
        return None
    x = reduce(lambda a, b: multiply(build, a, b, order), [operand(build, factor) for factor in factors])
    return x if scale == 1.0 else Operand(build.call(aten.mul.Tensor, (x.node, scale)), x.axes)


def _lay(build: Builder, x: Operand | None, groups: tuple[Label, ...], number: float, like: torch.Tensor) -> Node:
    """Lay a product out dense, each axis a group of symbols; a number if there is no product."""
    if x is None:
        sizes = [_size(group) for group in groups]
        return build.call(aten.full.default, (sizes, number), {"dtype": like.dtype, "device": like.device})
    node = lay_out(build, x, Product(groups, ()))
    if value(node).is_contiguous():
        return node
    return build.call(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})


def _lasts(scan: Scan) -> list[Node]:
    """Return the nodes that read the state behind the last chunk."""
    rank, size = value(scan.states).dim(), value(scan.states).shape[scan.dim]
    reads = [node for node in scan.states.users if node.target is aten.select.int]
    return [node for node in reads if arg(node, 1) % rank == scan.dim and arg(node, 2) in (-1, size - 1)]


def _lay_last(build: Builder, node: Node, last: Node, scan: Scan, axes: Label) -> Node:
    """Lay the last state out as a part of all states, which gives it their strides; Inductor writes that part only."""
    like, dim = value(scan.states), scan.dim
    x = Operand(build.reshape(last, [[axis.size] for axis in axes]), list(axes))
    state = lay_out(build, x, Product(_with(scan.entry.labels, dim, ()), ()))
    if value(state).dtype != like.dtype:
        state = build.call(torch.ops.prims.convert_element_type.default, (state, like.dtype))
    before = [0, 0] * (like.dim() - 1 - dim) + [like.shape[dim] - 1, 0]
    states = build.restride(build.call(aten.constant_pad_nd.default, (state, before)), like)
    return build.call(aten.select.int, (states, dim, arg(node, 2)))
