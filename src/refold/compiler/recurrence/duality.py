"""Emit the forms of a contracted scan (`refold.compiler.recurrence.forms`), with operands as operators take them.

    heads       x (b, t, h, p)   dt (b, t, h)   A (h)      B, C (b, t, g, n)   state (b, h, p, n)
    channels    x (b, t, d)      dt (b, t, d)   A (d, n)   B, C (b, t, n)      state (b, d, n)
    keys        v (b, t, h, p)   g (b, t, h, n)            k, q (b, t, h, n)   state (b, h, n, p)

The states are (t, b, *kept, n), as `facts` has them. A list of axes (``per_step``, ``along_n``, ...) names axes of the
states; None in it is an axis of size one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from math import inf, log, prod
from operator import getitem
from typing import Any

import torch
from torch.fx import Node

from ...ops.torch.registry import Operation
from ..ir.builder import Builder
from ..ir.fx import mark_as_made, power, value
from ..ir.operators import CONTRACTED, HEADS, RANK_ONE
from ..ir.views import is_view
from . import lti_chunks
from .facts import Factors, Facts, spans, unalias
from .readout import Placed, along
from .segment_sums import filled
from .signs import Sign, fades, sign

aten = torch.ops.aten


# A log decay this small counts as none: its exponential is one in every precision, and x divided by it finite.
NO_DECAY = 2.0**-60
FORGETS = -1e4
"""A log decay whose exponential is zero in every precision, whatever grows next to it."""
_TOKENS = [1, 0]
"""The axes of the states that tokens lie along: batch and time."""


def per_head(facts: Facts) -> tuple[Node, Node] | None:
    """Emit `HEADS`: the decay is one number per head, so matrix products carry the scan."""
    assert facts.decay is not None
    emit, n, heads, rest = facts.emit, facts.n, facts.heads, facts.decay.rest
    channels = [place for place in facts.kept if place not in heads]
    head = heads[0] if heads else None
    signs: Node | None = None
    if not rest.positive:
        signs = _signs(emit, rest, [*_TOKENS, head], facts.shape)
        rest = Factors(
            abs(rest.number), [Placed(emit.call(aten.abs.default, t.node), t.state_axes) for t in rest.terms]
        )
    x = lay(emit, facts.values, [*_TOKENS, head, *channels], facts.shape, facts.inputs.number)
    if x is None:
        return None
    if signs is not None:
        x = emit.call(aten.mul.Tensor, x, signs)
    given = _operands(facts, x, [*_TOKENS, head if facts.wide else None, n], [*_TOKENS, head], [head])
    if given is None:
        return None
    if not facts.decay.plain:
        logs = _log_decay(emit, rest, [*_TOKENS, head], [head], facts.shape, x)
        given |= dict(zip(("x", "dt", "A"), logs, strict=True))
    limits = {"dt_limit": step_limits(sign(given["dt"]))}
    return _scanned(facts, HEADS, given, [1, head, *channels, n], signs, **limits)


def per_channel(facts: Facts) -> tuple[Node, Node] | None:
    """Emit `CONTRACTED`: the decay differs between channels and states."""
    assert facts.decay is not None
    rest, channels = facts.decay.rest, [*_TOKENS, *facts.kept]
    x = lay(facts.emit, facts.values, channels, facts.shape, facts.inputs.number)
    if x is None:
        return None
    given = _operands(facts, x, [*_TOKENS, facts.n], channels, [*facts.kept, facts.n])
    if given is not None and not facts.decay.plain:
        decay = lay(facts.emit, rest.terms, channels, facts.shape, rest.number, like=x)
        given = None if decay is None else {**given, "decay": decay}
    if given is None:
        return None
    return _scanned(facts, CONTRACTED, given, [1, *facts.kept, facts.n])


def _operands(
    facts: Facts, x: Node, along_n: Sequence[int | None], per_step: Sequence[int | None], per_rate: Sequence[int | None]
) -> dict[str, Node] | None:
    """Lay the operands out next to x; None if one of them runs along other axes."""
    emit, shape, decay = facts.emit, facts.shape, facts.decay
    assert decay is not None
    dt = lay(emit, decay.steps, per_step, shape, 1.0, like=x)
    A = lay(emit, decay.rates, per_rate, shape, decay.rate, like=x)
    B, C = (lay(emit, part, along_n, shape, 1.0, like=x) for part in (facts.keys, facts.queries))
    if dt is None or A is None or B is None or C is None:
        return None
    return {"x": x, "dt": dt, "A": A, "B": B, "C": C}


def _scanned(
    facts: Facts, scan: Operation, given: dict[str, Node], state_order: list[int | None], signs: Node | None = None,
    **options: Any,
) -> tuple[Node, Node] | None:  # fmt: skip
    """Emit an operator, and lay its results out; None if its operands do not fit together.

    Args:
        facts: The recurrence.
        scan: The operator.
        given: Its operands.
        state_order: The axes of its state.
        signs: What x was multiplied by, and results are (`_signs`).
        **options: Its options.
    """
    emit, read, shape, initial = facts.emit, facts.read, facts.shape, facts.initial
    if len({value(v).dtype for v in given.values()}) != 1:
        return None
    C = given["C"]
    if initial is not None:
        aligned = emit.permute(initial, [place - 1 for place in state_order if place is not None])
        initial = emit.reshape(aligned, [1 if place is None else shape[place] for place in state_order])
        initial = emit.dense(emit.cast(initial, value(C).dtype))
    if read.exclusive:
        given["C"] = _next(emit, C)
    dense = {letter: emit.dense(v) for letter, v in given.items()}
    result = emit.call(scan.target, *scan.args(**dense, initial_state=initial, **options))
    mark_as_made(result)
    y, last = (emit.call(getitem, result, i) for i in (0, 1))
    if signs is not None:
        y = emit.call(aten.mul.Tensor, y, signs)
        final = emit.call(aten.select.int, signs, 1, shape[0] - 1)
        last = emit.call(aten.mul.Tensor, last, emit.call(aten.unsqueeze.default, final, -1))
    if read.exclusive:
        query = emit.call(aten.unsqueeze.default, emit.call(aten.select.int, C, 1, 0), -2)
        y = _one_later(emit, y, query, initial, -1)
    natural = [place for place in state_order if place is not None]
    return _results(facts, (y, [*_TOKENS, *natural[1:-1]]), (last, natural))


def _signs(emit: Builder, decays: Factors, order: list[Any], shape: list[int]) -> Node:
    """Return the sign P of the product of all decays up to each step, (batch, time, head, 1).

    States with these signs, ``P[t] h[t] = |a[t]| P[t-1] h[t-1] + P[t] x[t]``, have decays that are never negative.
    """
    laid = lay(emit, decays.terms, [*order, None], shape, decays.number)
    assert laid is not None  # decays run along no other axis
    return signs_of(emit, laid)[0]


def signs_of(emit: Builder, decays: Node) -> tuple[Node, Node]:
    """Return the signs of the products of decays (b, t, ...) up to each step, and of each step's alone."""
    one, minus = (emit.full(sign, decays) for sign in (1.0, -1.0))
    own = emit.call(aten.where.self, emit.call(aten.lt.Scalar, decays, 0), minus, one)
    return emit.call(aten.cumprod.default, own, 1), own


def _results(facts: Facts, y: tuple[Node, list[int]], last: tuple[Node, list[int]]) -> tuple[Node, Node]:
    """Lay out what an operator returned as the contraction and the state were; each comes with its axes."""
    emit, read, shape = facts.emit, facts.read, facts.shape
    out, order = y
    target = sorted(order)
    out = emit.reshape(out, [shape[place] for place in order])
    out = emit.permute(out, [order.index(place) for place in target])
    for term in facts.rest:
        out = emit.call(aten.mul.Tensor, out, lay(emit, [term], list(target), shape, 1.0, dense=False))
    out = emit.times(out, read.scale)
    for product in read.extra_terms:
        out = emit.call(aten.add.Tensor, out, _contracted(emit, *product, read.summed, target, shape))
    # The contraction's own axes, less those of size one.
    out = emit.reshape(emit.permute(out, _order(read.out, target, shape)), list(value(read.node).shape))
    state, order = last
    state = emit.reshape(state, [shape[place] for place in order])
    state = emit.permute(state, [order.index(place) for place in sorted(order)])
    return emit.cast(out, value(read.node).dtype), state


def _contracted(
    emit: Builder, scale: float, factors: list[Placed], n: int, target: list[int], shape: list[int]
) -> Node:
    """Sum a product over n, and lay it out for broadcasting; what does not run along n is multiplied afterwards."""
    along, rest = Factors(scale, factors).along(n)
    parts = [lay(emit, [term], target, shape, 1.0, dense=False) for term in rest]
    if along:
        parts.insert(0, emit.call(aten.sum.dim_IntList, lay(emit, along, [*target, n], shape, 1.0, dense=False), [-1]))
    total = emit.combined(aten.mul.Tensor, parts)  # a summand is a tensor, and so has a factor
    scale *= 1.0 if along else shape[n]
    return emit.times(total, scale)


def _next(emit: Builder, queries: Node) -> Node:
    """Return queries (b, t, ...) one step earlier, ``C[t+1]``; zero at the end."""
    first, later = (emit.call(aten.slice.Tensor, queries, 1, *cut) for cut in ((0, 1), (1, sys.maxsize)))
    return emit.call(aten.cat.default, [later, emit.full(0.0, first, value(first).shape)], 1)


def _one_later(emit: Builder, y: Node, query: Node, initial: Node | None, along: int) -> Node:
    """Return y (b, t, ...) one step later, ``y[t-1]``; the first is ``query * initial``, summed along its axis n."""
    first = emit.call(aten.slice.Tensor, y, 1, 0, 1)
    if initial is None:
        first = emit.full(0.0, first, value(first).shape)
    else:
        product = emit.call(aten.mul.Tensor, query, initial)
        first = emit.call(aten.unsqueeze.default, emit.call(aten.sum.dim_IntList, product, [along]), 1)
    return emit.call(aten.cat.default, [first, emit.call(aten.slice.Tensor, y, 1, 0, -1)], 1)


def time_invariant(facts: Facts) -> tuple[Node, Node] | None:
    """Emit `lti_scan`."""
    emit, n, shape, initial = facts.emit, facts.n, facts.shape, facts.initial
    (keys, values_), (number, decays) = facts.b.along(n), facts.a
    read = spans(*keys, *facts.queries, *decays)
    heads = [place for place in facts.kept if place in read]
    columns = [1, *(place for place in facts.kept if place not in heads)]
    x = lay(emit, values_, [*heads, 0, *columns], shape, facts.b.number)
    if x is None:
        return None
    decay = lay(emit, decays, [*heads, n], shape, number)
    q, k = (lay(emit, part, [*heads, n], shape, 1.0, like=x) for part in (facts.queries, keys))
    if q is None or k is None or decay is None or len({value(v).dtype for v in (q, k, decay, x)}) != 1:
        return None
    if initial is not None:
        initial = emit.cast(emit.permute(initial, [place - 1 for place in (*heads, n, *columns)]), value(x).dtype)
        initial = merged(emit, merged(emit, initial, 0, len(heads)), 2)
    q, k, decay, x = (merged(emit, v, 0, len(heads)) for v in (q, k, decay, x))
    y, last = lti_chunks.lti_scan(emit, q, k, decay, merged(emit, x, 2), initial)
    if facts.read.exclusive:
        y = _one_later(emit, y, emit.call(aten.unsqueeze.default, q, 2), initial, 1)
    return _results(facts, (y, [*heads, 0, *columns]), (last, [*heads, n, *columns]))


def gated(facts: Facts) -> tuple[Node, Node] | None:
    """Emit `RANK_ONE`, which corrects nothing here: the decay is one number per key."""
    emit, n, shape, initial = facts.emit, facts.n, facts.shape, facts.initial
    (keys, values_), (weight, decays) = facts.b.along(n), facts.a
    heads, channels = gated_axes(facts)
    tokens: list[int | None] = [*_TOKENS, *heads]

    def laid(parts: list[Placed], last: list[int], number: float = 1.0, like: Node | None = None) -> Node | None:
        x = lay(emit, parts, [*tokens, *last], shape, number, like)
        return None if x is None else emit.dense(merged(emit, merged(emit, x, 2, len(tokens)), 3))

    v = laid(values_, channels, facts.b.number)
    q, k = (laid(part, [n], like=v) for part in (facts.queries, keys))
    logs = [laid([Placed(logarithm(emit, term), term.state_axes)], [n]) for term in decays]
    if q is None or k is None or v is None or None in logs or len({value(x).dtype for x in (q, k, v)}) != 1:
        return None
    g = emit.combined(aten.add.Tensor, logs)
    g = g if weight == 1.0 else emit.call(aten.add.Tensor, g, log(weight))
    state_order = [1, *heads, n, *channels]
    if initial is not None:
        initial = emit.permute(initial, [place - 1 for place in state_order])
        initial = emit.dense(merged(emit, merged(emit, emit.cast(initial, value(v).dtype), 1, len(tokens) - 1), 3))
    exclusive = facts.read.exclusive
    result = emit.call(RANK_ONE.target, *uncorrected(emit, _next(emit, q) if exclusive else q, k, v, g, initial))
    mark_as_made(result)
    y, last = (emit.call(getitem, result, i) for i in (0, 1))
    if exclusive:
        first = emit.call(aten.unsqueeze.default, emit.call(aten.select.int, q, 1, 0), -1)
        y = _one_later(emit, y, first, initial, -2)
    return _results(facts, (y, [*_TOKENS, *heads, *channels]), (last, state_order))


def uncorrected(emit: Builder, q: Node, k: Node, v: Node, g: Node, initial: Node | None) -> tuple[Any, ...]:
    """Return the arguments of a `RANK_ONE` that corrects nothing, given log decays per head or per key."""
    g = emit.call(aten.clamp_min.default, g, FORGETS)
    return RANK_ONE.args(q=q, k=k, v=v, g=g, initial_state=initial, scale=1.0, erase=False)


def gated_axes(facts: Facts) -> tuple[list[int], list[int]]:
    """Find the axes that decays, keys or queries run along, and those of values alone."""
    wide = spans(*facts.b.along(facts.n)[0], *facts.queries, *facts.a.terms)
    heads = [place for place in facts.kept if place in wide]
    return heads, [place for place in facts.kept if place not in heads]


def merged(emit: Builder, x: Node, start: int, stop: int | None = None) -> Node:
    """Merge neighbouring axes into one; of none, it has size one."""
    shape: Sequence[int] = value(x).shape
    stop = len(shape) if stop is None else stop
    return emit.reshape(x, [*shape[:start], prod(shape[start:stop]), *shape[stop:]])


def _order(out: tuple[int | None, ...], target: list[int], shape: list[int]) -> list[int]:
    """Return the permutation of ``target`` that puts its axes as ``out`` has them, those of size one first."""
    wanted = [place for place in out if place is not None]
    ones = [place for place in target if place not in wanted]
    return [target.index(place) for place in (*ones, *wanted)]


def has_log_decay(facts: Facts) -> bool:
    """Tell whether `_log_decay` gives operands that are as exact as the recurrence.

    The operator multiplies x by dt, so x is divided by it. The gradient of dt then is a difference of large numbers
    where dt is small. Where a gradient is taken, there is no such way but for decays whose derivative is as small.
    """
    assert facts.decay is not None
    decays = facts.decay.rest.terms
    if facts.decay.plain or not spans(*decays) & {0, 1}:
        return True
    if any(value(term.node).dtype == torch.float16 for term in facts.values):  # a small reciprocal overflows
        return False
    return not torch.is_grad_enabled() or all(_fades_near_one(term.node) for term in decays)


def _log_decay(
    emit: Builder, decays: Factors, per_step: list[Any], per_head: list[Any], shape: list[int], x: Node
) -> tuple[Node, Node, Node]:
    """Return x, dt and A for decays that are no ``exp(dt * A)``: their logarithm is A, or dt if it depends on time.

    dt has the axes ``per_step``, A the axes ``per_head``, and x those of dt and one more.
    """
    timed = bool(spans(*decays.terms) & {0, 1})
    order = per_step if timed else per_head
    total = emit.full(log(decays.number), x, [1 if place is None else shape[place] for place in order])
    for term in decays.terms:
        laid = lay(emit, [Placed(logarithm(emit, term), term.state_axes)], order, shape, 1.0)
        assert laid is not None  # decays run along heads, batch and time alone
        total = emit.call(aten.add.Tensor, total, laid)
    sizes = [1 if place is None else shape[place] for place in per_step]
    heads = [1 if place is None else shape[place] for place in per_head]
    if not timed:
        bounded = emit.call(aten.clamp_min.default, total, forgets(value(x).dtype))
        return x, emit.full(1.0, x, sizes), bounded
    dt, rate = divisor(emit.call, total)
    return emit.call(aten.div.Tensor, x, emit.reshape(dt, [*sizes, 1])), dt, emit.full(rate, x, heads)


def _fades_near_one(decay: Node) -> bool:
    """Tell whether the derivative of a decay is as small as what is missing to one."""
    kept = filled(decay, 1.0) if decay.target is aten.where.self else None
    if kept or is_view(decay):
        return _fades_near_one(kept[0] if kept else decay.all_input_nodes[0])  # no gradient passes the one
    return decay.target is aten.sigmoid.default or ((read := power(decay)) is not None and fades(read[0]))


def logarithm(emit: Builder, term: Placed) -> Node:
    """Return the logarithm of a factor: of zero minus infinity, and none below that of the smallest normal number."""
    inner = unalias(term.node)
    if (read := power(inner)) is not None and value(inner).dim() == len(term.state_axes):
        return emit.times(*read)
    tiny = torch.finfo(value(term.node).dtype).tiny
    log = emit.call(aten.log.default, emit.call(aten.clamp_min.default, term.node, tiny))
    never = emit.full(-inf, term.node)
    # Where the factor is zero no gradient may pass the logarithm; a NaN stays one.
    return emit.call(aten.where.self, emit.call(aten.le.Scalar, term.node, 0), never, log)


def divisor(call: Callable[..., Node], a: Node) -> tuple[Node, float]:
    """Split log decays into steps, by which one can divide, and a rate; the exponential of their product is the same.

    Where log decays are never positive, steps are never negative: some kernels of its backward need that.
    """
    val, falls = value(a), sign(a).nonpositive
    small = call(aten.lt.Scalar, call(aten.abs.default, a), NO_DECAY)
    least = call(aten.full.default, [], -NO_DECAY if falls else NO_DECAY, dtype=val.dtype, device=val.device)
    steps = call(aten.clamp_min.default, call(aten.where.self, small, least, a), forgets(val.dtype))
    return (call(aten.neg.default, steps), -1.0) if falls else (steps, 1.0)


def step_limits(steps: Sign) -> tuple[float, float]:
    """Return limits for step sizes that change none of them."""
    return (0.0 if steps.nonnegative else -inf, inf)


def forgets(dtype: torch.dtype) -> float:
    """Return a log decay whose exponential is zero: operators sum up log decays, so one no larger than it must be."""
    return -746.0 if dtype == torch.float64 else -104.0


def lay(
    emit: Builder, parts: list[Placed], order: Sequence[int | None], shape: list[int], scale: float,
    like: Node | None = None, dense: bool = True,
) -> Node | None:  # fmt: skip
    """Multiply factors and lay the product out over axes of the states; None in the order is an axis of size one."""
    sizes = [1 if place is None else shape[place] for place in order]
    if any(place not in order for place in spans(*parts)):
        return None
    laid = [along(emit, term, order) for term in parts]
    if not laid:
        return None if like is None else emit.full(scale, like, sizes)
    total = emit.times(emit.combined(aten.mul.Tensor, laid), scale)
    return emit.expand(total, sizes) if dense else total
