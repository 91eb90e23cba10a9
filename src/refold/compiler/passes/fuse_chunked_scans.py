"""Hand a scan that was written in chunks to the operator that it is (design decision 4).

`refold.compiler.recurrence.chunked_form` reads it. Its outputs and its last state come from one ``ssd``. Where nothing
but the last state is wanted, that is one product over all of time,

    H = sum over t of exp(S[t,end]) B[t] X[t] + exp(S[start,end]) H[initial].

Causal attention without a softmax is such a scan, in one chunk of all tokens. Its outputs come from one ``ssd``, too.

Shapes. X is (b, t, h, p), B and C are (b, t, g, n), log decays (b, t, h), states (b, h, p, n). Source: Dao & Gu 2024
(arXiv:2405.21060), section 6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, Node

from ...ops.torch.registry import Operation
from ..ir.builder import Builder, same_strides, sort_topologically
from ..ir.contract import Operand, contract, lay_out, multiplied, multiply, operand
from ..ir.fx import CONVERT, SizesFixed, arg, is_tensor, is_training, value
from ..ir.index import CONTRACTIONS, Factor, Product
from ..ir.operators import HEADS, RANK_ONE
from ..ir.rewrite import Rewrite, replace_node
from ..ir.symbols import Axis, Label, atoms, extent, resolve, unify
from ..recurrence.chunked_form import ChunkStates, NotAScan, ScanForm, read_scan, read_states, require, with_label
from ..recurrence.duality import FORGETS, divisor, step_limits, uncorrected
from ..recurrence.narrowing import narrow_after, narrowed_later
from ..recurrence.quadratic_form import fix_sizes, read_attention
from ..recurrence.signs import fades, sign

aten = torch.ops.aten

_CHUNKED = "decays and products of each chunk are written out and read again"
_QUADRATIC = "weights of all pairs of tokens are written out and read again"


def fuse_chunked_scans(graph: Graph, wanted: Callable[[str], bool]) -> Iterator[Rewrite]:
    """Replace chunked scans by ``ssd``: their outputs and their last states."""
    if is_training(graph):
        return
    _merge_conversions(graph)
    for root in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        if not (_is_candidate(root) and _is_wanted(root, wanted)):
            continue
        a, b = root.all_input_nodes
        for within, across in ((a, b), (b, a)):
            try:
                yield from _replace(root, read_scan(within, across), wanted, "fuse chunked scan", _CHUNKED)
            except NotAScan:
                continue
            sort_topologically(graph)  # the last state may have been read before the outputs
            graph.eliminate_dead_code()
            break


def linearize_attention(graph: Graph, wanted: Callable[[str], bool]) -> Iterator[Rewrite]:
    """Replace causal attention without a softmax by ``ssd``: `refold.compiler.recurrence.quadratic_form` reads it.

    Raises:
        SizesFixed: What may be found holds for these sizes alone.
    """
    if is_training(graph):
        return
    for root in (node for target in CONTRACTIONS for node in graph.find_nodes(op="call_function", target=target)):
        if is_tensor(root) and _is_wanted(root, wanted) and fix_sizes(root):
            raise SizesFixed(f"this compile is for these sizes alone: masks are told by them [{root.name}]")
        if _is_known(root) and _is_wanted(root, wanted):
            with suppress(NotAScan):
                yield from _replace(root, read_attention(root), wanted, "linearize attention", _QUADRATIC)
                graph.eliminate_dead_code()


def _is_wanted(root: Node, wanted: Callable[[str], bool]) -> bool:
    """Tell whether a scan may be replaced, or else the 16-bit value that it becomes."""
    return wanted(root.name) or ((end := narrowed_later(root)) is not None and wanted(end.name))


def _merge_conversions(graph: Graph) -> None:
    """Let a value that is converted, and then converted again as a view, be converted once.

    ``x * dt[..., None].float()`` and ``A * dt.float()`` have the same step size; as two conversions they differ.
    """
    for node in graph.find_nodes(op="call_function", target=CONVERT):
        view = arg(node, 0)
        if view.target not in (aten.unsqueeze.default, aten.permute.default):
            continue
        twin = next((x for x in arg(view, 0).users if x.target is CONVERT and x.args[1] == node.args[1]), None)
        if twin is None:
            continue
        arg(view, 0).append(twin)
        build = Builder(node)
        new = build.call(view.target, twin, *view.args[1:])
        if same_strides(value(new), value(node)):
            node.replace_all_uses_with(new)
            graph.erase_node(node)
        else:
            graph.erase_node(new)


def _is_candidate(root: Node) -> bool:
    return (
        not root.kwargs
        and len(root.all_input_nodes) == 2
        and all(is_tensor(x) and value(x).shape == value(root).shape for x in root.all_input_nodes)
        and _is_known(root)
    )


def _is_known(root: Node) -> bool:
    return value(root).is_floating_point() and all(isinstance(size, int) and size for size in value(root).shape)


@dataclass
class _Operands:
    """The operator's arguments as products."""

    x: Product
    dt: Product
    A: Product
    B: Product
    C: Product
    kind: torch.dtype
    """What x, B and C become: the dtype of the result, or a wider one that one of them has. Decays may be wider."""
    free: bool
    """Whether x has no step size in common with the decay: ``dt`` is the log decay."""
    exact: bool
    """Whether x can be divided by that: its reciprocal is finite, and no gradient is lost."""


def _operands(scan: ScanForm, result: torch.dtype) -> _Operands:
    """Divide the factors among the arguments, taking the step size out of the log decay if x has it, too."""
    time, summed = set(resolve(scan.time)), set(resolve(scan.summed))
    steps = [factor for factor in scan.decays.factors if time & set(factor.axes())]
    rates = [factor for factor in scan.decays.factors if factor not in steps]
    written = list(scan.written.factors)
    free = False
    for step in steps:
        same = [factor for factor in written if factor.identity == step.identity]
        if not same:
            free, written = True, list(scan.written.factors)
            break
        written.remove(same[0])
    dt, A = Product((), tuple(steps)), Product((), tuple(rates), scan.decays.scale)
    if free:
        dt, A = scan.decays, Product((), ())
    # The reciprocal of a small number overflows half precision; its gradient, a difference of large ones, loses digits.
    lossy = torch.is_grad_enabled() and not all(fades(step.node) for step in steps)
    keys = [factor for factor in written if summed & set(factor.axes())]
    values = [factor for factor in written if factor not in keys]
    require(keys and (values or scan.states is None))  # without values, keys are summed
    kinds = [value(factor.node).dtype for factor in (*scan.written.factors, *scan.queries.factors)]
    kind = reduce(torch.promote_types, kinds, result)
    return _Operands(
        Product((), tuple(values), scan.written.scale), dt, A, Product((), tuple(keys)), scan.queries,
        kind, free, not (lossy or kind == torch.float16),
    )  # fmt: skip


def _spanned(factors: Sequence[Factor]) -> set[Axis]:
    return {axis for factor in factors for axis in factor.axes()}


@dataclass
class _Places:
    """The axes of a scan, by what they are to the operator; groups are the first of the heads."""

    batch: Label
    time: Label
    groups: Label
    heads: Label
    channels: Label
    summed: Label


def _places(scan: ScanForm, given: _Operands) -> _Places:
    outer = [axis for axis in atoms(scan.y.labels) if axis not in resolve(scan.padded)]
    read = _spanned([*given.B.factors, *given.C.factors])
    channels = tuple(axis for axis in outer if axis not in read | _spanned(scan.decays.factors))
    # Heads are what rates depend on or what shares B and C, and what lies after time in memory.
    inputs = max(given.x.factors or given.B.factors, key=lambda factor: len(factor.axes())).axes()
    leading = set(inputs[: min((inputs.index(axis) for axis in resolve(scan.time) if axis in inputs), default=0)])
    rest = [axis for axis in outer if axis not in channels]
    batch = tuple(axis for axis in rest if axis in leading & read and axis not in _spanned(given.A.factors))
    groups = tuple(axis for axis in rest if axis in read and axis not in batch)
    heads = (*groups, *(axis for axis in rest if axis not in read))
    return _Places(batch, resolve(scan.time), groups, heads, channels, resolve(scan.summed))


def _arguments(
    build: Builder, scan: ScanForm, given: _Operands, at: _Places
) -> tuple[Operation, tuple[Any, ...], list[Label]]:
    """Lay out what the operator takes; its name and the axes of a state, in its order, come with it."""
    tokens = (at.batch, at.time)
    order = [*at.batch, *at.time, *at.heads, *at.channels, *at.summed]
    parts = (given.x, given.dt, given.A, given.B, given.C)
    x, dt, A, B, C = (_multiplied(build, part, order) if part.factors else None for part in parts)
    rate, divided = given.A.scale, given.free and given.exact
    if divided and dt is not None:
        steps, rate = divisor(build.call, dt.node)
        dt = Operand(steps, dt.axes)
        if B and set(dt.axes) <= {*at.batch, *at.time, *at.groups} and extent(at.summed) <= extent(at.channels):
            B = multiply(build, B, dt, order, by=aten.div.Tensor)
        elif x:
            x = multiply(build, x, dt, order, by=aten.div.Tensor)
        else:
            x = Operand(build.times(build.call(aten.reciprocal.default, dt.node), given.x.scale), dt.axes)
    kind, wide = given.kind, torch.promote_types(given.kind, torch.float32)
    v = _lay(build, x, (*tokens, at.heads, at.channels), given.x.scale, kind)
    stepped = kind if dt is None else torch.promote_types(kind, value(dt.node).dtype)
    dts = _lay(build, dt, (*tokens, at.heads), given.dt.scale, stepped)
    k, q = (_lay(build, part, (*tokens, at.groups, at.summed), 1.0, kind) for part in (B, C))
    operator = HEADS if divided or not given.free else RANK_ONE
    inner = [at.channels, at.summed] if operator is HEADS else [at.summed, at.channels]
    state, initial = [at.batch, at.heads, *inner], None
    if scan.states is not None and scan.states.initial is not None:
        initial = _lay(build, operand(build, scan.states.initial), tuple(state), 1.0, kind)
    if operator is HEADS:
        rates, limits = _lay(build, A, (at.heads,), rate, wide), step_limits(sign(dts))
        found = HEADS.args(x=v, dt=dts, A=rates, B=k, C=q, initial_state=initial, dt_limit=limits)
    else:
        found = uncorrected(build, q, k, v, dts, initial)
    return operator, found, state


def _replace(root: Node, scan: ScanForm, wanted: Callable[[str], bool], name: str, why: str) -> Iterator[Rewrite]:
    """Replace what an operator computes by its results."""
    given = _operands(scan, value(root).dtype)
    at, build, like = _places(scan, given), Builder(root), value(root)
    operator, arguments, state = _arguments(build, scan, given, at)
    result = build.call(operator.target, *arguments)
    y, last = (build.call(getitem, result, i) for i in (0, 1))
    if missing := extent(resolve(scan.padded)) - extent(at.time):
        y = build.call(aten.constant_pad_nd.default, y, [0, 0, 0, 0, 0, missing])
    axes = [*at.batch, *resolve(scan.padded), *at.heads, *at.channels]
    out = Operand(build.reshape(y, [axis.size for axis in axes]), axes)
    for part in scan.divisors:
        out = multiply(build, out, _multiplied(build, part, axes), axes, by=aten.div.Tensor)
    y = build.restride(build.cast(lay_out(build, out, scan.y), like.dtype), like)
    axes = [axis for label in state for axis in label]
    end = Operand(build.reshape(last, [axis.size for axis in axes]), axes)
    states = scan.states
    lasts = [] if states is None else [(node, _lay_last(build, node, end, states)) for node in states.lasts()]

    tokens, size = extent(at.time), f"{extent(at.channels)} x {extent(at.summed)}"
    detail = f"{tokens} tokens, {extent(at.heads)} heads of {size} as one {operator.name}"
    said: dict[str, Any] = {"name": name, "detail": detail, "terms": tokens}
    narrowed = None if lasts else narrow_after(root, y, build.added, wanted, why=f"{why}, widened to float32", **said)
    if narrowed is not None:
        yield narrowed
        return
    if not wanted(root.name):
        build.undo()
        return
    made = set(build.added)
    for old, new in [(root, y), *((node, new) for node, new in lasts if wanted(node.name))]:
        yield replace_node(
            old,
            new,
            added=made,
            why=why,
            multilinear=False,
            timed_alone=old is root,  # the last state falls off while the outputs are computed
            spread=0.1,
            **said,
        )


def _multiplied(build: Builder, product: Product, order: Sequence[Axis]) -> Operand:
    """Multiply the factors of a product."""
    x = multiplied(build, product.factors, order)
    return Operand(build.times(x.node, product.scale), x.axes)


def _lay(build: Builder, x: Operand | None, groups: tuple[Label, ...], number: float, kind: torch.dtype) -> Node:
    """Lay a product out dense, each axis a group of symbols; a number if there is no product."""
    if x is None:
        sizes = [extent(group) for group in groups]
        return build.call(aten.full.default, sizes, number, dtype=kind, device=value(build.anchor).device)
    return build.dense(build.cast(lay_out(build, x, Product(groups, ())), kind))


def _lay_last(build: Builder, node: Node, state: Operand, states: ChunkStates) -> Node:
    like = value(states.node)
    x = lay_out(build, state, Product(with_label(states.layout.labels, states.dim, ()), ()))
    return _last_of(build, build.cast(x, like.dtype), node, states)


def _last_of(build: Builder, x: Node, node: Node, states: ChunkStates) -> Node:
    """Make the last state a part of all states, which gives it their strides; Inductor writes that part only."""
    like, dim = value(states.node), states.dim
    before = [0, 0] * (like.dim() - 1 - dim) + [like.shape[dim] - 1, 0]
    padded = build.restride(build.call(aten.constant_pad_nd.default, x, before), like)
    return build.call(aten.select.int, padded, dim, arg(node, 2))


# The last state alone ------------------------------------------------------------------------


def contract_last_states(graph: Graph, wanted: Callable[[str], bool]) -> Iterator[Rewrite]:
    """Compute a last state that is all that is read of the states as one product over all of time."""
    if is_training(graph):
        return
    for root in graph.find_nodes(op="call_function", target=aten.select.int):
        node = arg(root, 0)
        if not (wanted(root.name) and value(root).is_floating_point() and len(node.users) == 1):
            continue
        try:
            states = read_states(node, arg(root, 1) % value(node).dim())
            require(states.lasts() == [root])
            yield _contract_last_state(root, states)
        except NotAScan:
            continue
        graph.eliminate_dead_code()


def _contract_last_state(root: Node, states: ChunkStates) -> Rewrite:
    """Emit the product and replace the state."""
    after, step, decays = resolve(states.end.after or ()), resolve(states.end.step), states.end.source
    time = (*resolve(states.chunk), *after)
    labels = with_label(states.layout.labels, states.dim, ())
    out = list(atoms(labels))
    require(len({*time, *step, *out}) == len(time) + len(step) + len(out))
    require(_spanned(states.written.factors) <= {*time, *out})
    require(_spanned(decays.factors) <= {*resolve(states.chunk), *step, *out})
    require(unify(step, after))
    time = resolve(time)
    require(set(time) <= _spanned(decays.factors))
    build = Builder(root)
    a = _multiplied(build, decays, [*out, *time])
    outer = [axis for axis in a.axes if axis not in time]
    row = lay_out(build, a, Product((*((axis,) for axis in outer), time), ()))
    bounded = build.call(aten.clamp_min.default, row, FORGETS)
    since = build.call(aten.cumsum.default, bounded, len(outer), dtype=torch.float64)
    total = build.call(aten.slice.Tensor, since, len(outer), extent(time) - 1, extent(time))
    to_end = _exponential(build, build.call(aten.sub.Tensor, total, since), [*outer, *time], value(root).dtype)
    written = sorted((operand(build, factor) for factor in states.written.factors), key=lambda x: value(x.node).numel())
    state = contract(build, [to_end, *written], set(out), out)
    state = Operand(build.times(state.node, states.written.scale), state.axes)
    new = lay_out(build, state, Product(labels, ()))
    if states.initial is not None:
        through = _exponential(build, total, outer, value(root).dtype)
        first = multiply(build, through, operand(build, states.initial), out)
        new = build.call(aten.add.Tensor, new, lay_out(build, first, Product(labels, ())))
    new = _last_of(build, new, root, states)
    return replace_node(
        root,
        new,
        added=build.added,
        name="contract last state",
        why="the state after each chunk is written out, and only the last is read",
        detail=f"the state after {extent(time)} tokens as one product",
        multilinear=False,
        terms=extent(time),
        spread=0.1,
    )


def _exponential(build: Builder, x: Node, axes: list[Axis], dtype: torch.dtype) -> Operand:
    narrow = build.call(CONVERT, x, dtype)
    return Operand(build.reshape(build.call(aten.exp.default, narrow), [axis.size for axis in axes]), axes)
