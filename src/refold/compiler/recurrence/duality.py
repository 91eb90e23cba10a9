"""From a scan whose states are only read through a contraction to the operator that never writes them.

The states ``h`` of a scan are (time, batch, ..., n). Only ``y = sum over n of h * C`` may read them. The scan is a
selective scan if its factors are ``decay * exp(dt * A)`` and its inputs are ``dt * x * B``. Decay must not span n, and
no factor of the inputs may span both x's axes and n. If the factors are ``exp(dt * A)`` and depend on neither x's last
axis nor n, the scan is a state space dual (`refold.ops.ssd`), which is computed by matrix products. Factors are read in
index notation, so the spelling does not matter. What cannot be read that way stays a scan.

Axes. The states are (t, b, *kept, n) in some order of kept and n: axis 0 is time, and axis 1 is the batch. The
contraction sums the axis ``n``. ``y`` keeps the other axes, ``kept``. Operands are laid out as operators take them:

    ssd             x (b, t, h, p)   dt (b, t, h)   A (h)      B, C (b, t, g, n)   state (b, h, p, n)
    selective_scan  x (b, t, d)      dt (b, t, d)   A (d, n)   B, C (b, t, n)      state (b, d, n)

A list of axes (``tokens``, ``per_step``, ``along_n``, ...) names axes of the states; None in it is an axis of size one.
Sources: selective_scan is algorithm 2 of Gu & Dao 2023 (arXiv:2312.00752), ssd the duality of Dao & Gu 2024
(arXiv:2405.21060).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import inf, log
from operator import getitem
from typing import Any

import torch
from torch.fx import Node

from ..ir.builder import Builder
from ..ir.fx import arg, mark_as_made, value
from ..ir.operators import CONTRACTED, HEADS
from ..ir.sinking import sliced_early
from . import lti_chunks
from .gated_chunks import CHUNK, gated_scan, merged
from .readout import Readout, Term, terms
from .signs import Sign, fades, sign
from .vectorize import Value

aten = torch.ops.aten


# A log decay this small counts as none: its exponential is one in every precision, and x divided by it finite.
NO_DECAY = 2.0**-60


def match_operator(
    emit: Builder, read: Readout, scale: Value | None, offset: Value | None, shape: list[int], initial: Node | None
) -> tuple[Node, Node] | None:
    """Emit the operator for ``y``, where ``h[t] = scale[t] h[t-1] + offset[t]`` and ``y[t] = sum over n of C[t] h[t]``.

    Args:
        emit: Where to.
        read: How the states are read.
        scale: What each state is multiplied by on the way to the next, broadcast to ``shape``; None for 1.
        offset: What is added, broadcast to ``shape``.
        shape: Shape of all states: (t, b, *kept and n).
        initial: The state before the first, ``shape[1:]``; None for zeros.

    Returns:
        ``y`` as ``read.node`` has it, and the last state; None if no operator fits.
    """
    if offset is None or not offset.has_time:
        return None
    rank, n = len(shape), read.summed
    kept = [place for place in range(2, rank) if place != n]
    every = tuple(range(rank))
    rate, exponent = 0.0, list[Term]()
    weight, decays = 1.0, list[Term]()
    if (same_every_step := _time_invariant(emit, read, scale, offset, shape, initial)) is not None:
        return same_every_step
    if scale is not None and not isinstance(scale.node, Node):
        weight = float(scale.node)
    elif scale is not None:
        factors = sliced_early(emit, scale.padded(emit, rank - 1))
        state_axes = every[rank - value(factors).dim() :]
        found = _decay(emit, factors, state_axes, n)
        if found is None:
            return _gated(emit, read, scale, offset, shape, initial)
        (rate, exponent), (weight, decays) = found
    steps = [term for term in exponent if term.spans() & {0, 1}]
    rates = [term for term in exponent if not term.spans() & {0, 1}]
    factor, inputs = terms(emit, sliced_early(emit, offset.padded(emit, rank - 1)), every)
    if Counter(steps) - Counter(inputs):  # the inputs have no step size in common with the decay
        steps, rates, rate = [], [], 0.0
        weight, decays = terms(emit, factors, state_axes)
    for term in steps:
        inputs.remove(term)
    keys, values_ = _divide(inputs, n)
    queries, rest = _divide(read.others, n)
    spans = {place for term in (*steps, *rates, *decays) for place in term.spans()}
    wide = {place for term in keys + queries for place in term.spans()} & set(kept)
    plain = weight == 1.0 and not decays
    positive = plain or (weight > 0 and all(_is_positive(term.node) for term in decays))
    tokens = [1, 0]
    state_order: list[Any]
    along_n: list[Any]
    per_step: list[Any]
    per_rate: list[Any]
    heads = [place for place in kept if place in spans | wide] or (kept[:1] if len(kept) == 2 else [])
    channels = [place for place in kept if place not in heads]
    # Where no gradient is taken, signs can be kept apart: that of a logarithm says nothing at a decay of zero.
    signed = bool(decays) and weight != 0 and not positive and not torch.is_grad_enabled()
    signs: Node | None = None
    if (positive or signed) and n not in spans and len(kept) <= 2 and len(channels) == 1:
        # The decay is one number per head: matrix products carry the scan.
        head = heads[0] if heads else None
        if signed:
            signs = _signs(emit, decays, weight, [*tokens, head], shape)
            weight, decays = abs(weight), [Term(emit.call(aten.abs.default, t.node), t.state_axes) for t in decays]
        state_order, scan = [1, head, *channels, n], HEADS
        x = _lay(emit, values_, [*tokens, head, *channels], shape, factor)
        if signs is not None and x is not None:
            x = emit.call(aten.mul.Tensor, x, signs)
        along_n, per_step, per_rate = [*tokens, head if wide else None, n], [*tokens, head], [head]
    elif len(kept) == 1 and not wide and all(n not in term.spans() for term in decays):
        state_order, scan = [1, *kept, n], CONTRACTED
        x = _lay(emit, values_, [*tokens, *kept], shape, factor)
        along_n, per_step, per_rate = [*tokens, n], [*tokens, *kept], [*kept, n]
    else:
        return _gated(emit, read, scale, offset, shape, initial)
    if x is None:
        return None
    dt = _lay(emit, steps, per_step, shape, 1.0, like=x)
    A = _lay(emit, rates, per_rate, shape, rate, like=x)
    B, C = (_lay(emit, part, along_n, shape, 1.0, like=x) for part in (keys, queries))
    if dt is None or A is None or B is None or C is None:
        return None
    operands = {"x": x, "dt": dt, "A": A, "B": B, "C": C}
    if scan is HEADS and not plain:
        found_log = _log_decay(emit, decays, weight, per_step, per_rate, shape, x)
        if found_log is None:
            return _gated(emit, read, scale, offset, shape, initial)
        operands |= dict(zip(("x", "dt", "A"), found_log, strict=True))
    if scan is CONTRACTED and not plain:
        decay = _lay(emit, decays, [*tokens, *kept], shape, weight, like=x)
        if decay is None:
            return None
        operands["decay"] = decay
    if len({value(v).dtype for v in operands.values()}) != 1:
        return None
    if initial is not None:
        aligned = emit.permute(initial, [place - 1 for place in state_order if place is not None])
        initial = emit.reshape(aligned, [1 if place is None else shape[place] for place in state_order])
        initial = emit.dense(emit.cast(initial, value(x).dtype))
    if read.exclusive:
        operands["C"] = _next(emit, C)
    given = {letter: emit.dense(v) for letter, v in operands.items()}
    limits = {"dt_limit": step_limits(sign(operands["dt"]))} if scan is HEADS else {}
    result = emit.call(scan.target, *scan.args(**given, initial_state=initial, **limits))
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
    return _results(emit, read, rest, shape, (y, [*tokens, *natural[1:-1]]), (last, natural))


def _signs(emit: Builder, decays: list[Term], weight: float, order: list[Any], shape: list[int]) -> Node:
    """Return the sign P of the product of all decays up to each step, (batch, time, head, 1).

    States with these signs, ``P[t] h[t] = |a[t]| P[t-1] h[t-1] + P[t] x[t]``, have decays that are never negative.
    """
    laid = _lay(emit, decays, [*order, None], shape, weight)
    assert laid is not None  # decays run along no other axis
    val = value(laid)
    one, minus = (emit.call(aten.full.default, [], s, dtype=val.dtype, device=val.device) for s in (1.0, -1.0))
    signs = emit.call(aten.where.self, emit.call(aten.lt.Scalar, laid, 0), minus, one)
    return emit.call(aten.cumprod.default, signs, 1)


def _results(
    emit: Builder, read: Readout, rest: list[Term], shape: list[int],
    y: tuple[Node, list[int]], last: tuple[Node, list[int]],
) -> tuple[Node, Node]:  # fmt: skip
    """Lay out what an operator returned as the contraction and the state were; each comes with its axes."""
    out, order = y
    target = sorted(order)
    out = emit.reshape(out, [shape[place] for place in order])
    out = emit.permute(out, [order.index(place) for place in target])
    for term in rest:
        out = emit.call(aten.mul.Tensor, out, _lay(emit, [term], list(target), shape, 1.0, dense=False))
    if read.scale != 1.0:
        out = emit.call(aten.mul.Tensor, out, read.scale)
    for product in read.extra_terms:
        out = emit.call(aten.add.Tensor, out, _contracted(emit, *product, read.summed, target, shape))
    # The contraction's own axes, less those of size one.
    out = emit.reshape(emit.permute(out, _order(read.out, target, shape)), list(value(read.node).shape))
    state, order = last
    state = emit.reshape(state, [shape[place] for place in order])
    state = emit.permute(state, [order.index(place) for place in sorted(order)])
    return emit.cast(out, value(read.node).dtype), state


def _contracted(emit: Builder, scale: float, factors: list[Term], n: int, target: list[int], shape: list[int]) -> Node:
    """Sum a product over n, and lay it out for broadcasting; what does not run along n is multiplied afterwards."""
    along, rest = _divide(factors, n)
    total: Node | None = None
    if along:
        total = emit.call(aten.sum.dim_IntList, _lay(emit, along, [*target, n], shape, 1.0, dense=False), [-1])
    for term in rest:
        x = _lay(emit, [term], list(target), shape, 1.0, dense=False)
        total = x if total is None else emit.call(aten.mul.Tensor, total, x)
    assert total is not None  # a summand is a tensor, and so has a factor
    scale *= 1.0 if along else shape[n]
    return total if scale == 1.0 else emit.call(aten.mul.Tensor, total, scale)


def _next(emit: Builder, queries: Node) -> Node:
    """Return queries (b, t, ...) one step earlier, ``C[t+1]``; zero at the end."""
    return emit.call(aten.constant_pad_nd.default, queries, [0, 0] * (value(queries).dim() - 2) + [-1, 1], 0.0)


def _one_later(emit: Builder, y: Node, query: Node, initial: Node | None, along: int) -> Node:
    """Return y (b, t, ...) one step later, ``y[t-1]``; the first is ``query * initial``, summed along its axis n."""
    later = emit.call(aten.constant_pad_nd.default, y, [0, 0] * (value(y).dim() - 2) + [1, -1], 0.0)
    if initial is None:
        return later
    product = emit.call(aten.mul.Tensor, query, initial)
    first = emit.call(aten.unsqueeze.default, emit.call(aten.sum.dim_IntList, product, [along]), 1)
    return emit.call(aten.cat.default, [first, emit.call(aten.slice.Tensor, y, 1, 0, value(y).shape[1] - 1)], 1)


def _time_invariant(
    emit: Builder, read: Readout, scale: Value | None, offset: Value, shape: list[int], initial: Node | None
) -> tuple[Node, Node] | None:
    """Emit `lti_scan`, if decays differ along n and nothing but one factor of what is added depends on time."""
    if scale is None or not isinstance(scale.node, Node) or shape[0] < lti_chunks.CHUNK:
        return None
    rank, n = len(shape), read.summed
    factors = sliced_early(emit, scale.padded(emit, rank - 1))
    weight, decays = terms(emit, factors, tuple(range(rank - value(factors).dim(), rank)))
    factor, inputs = terms(emit, sliced_early(emit, offset.padded(emit, rank - 1)), tuple(range(rank)))
    keys, values_ = _divide(inputs, n)
    queries, rest = _divide(read.others, n)
    spans = {place for term in (*keys, *queries, *decays) for place in term.spans()}
    if spans & {0, 1} or not any(n in term.spans() for term in decays):
        return None
    heads = [place for place in range(2, rank) if place != n and place in spans]
    columns = [1, *(place for place in range(2, rank) if place not in (*heads, n))]
    x = _lay(emit, values_, [*heads, 0, *columns], shape, factor)
    if x is None:
        return None
    decay = _lay(emit, decays, [*heads, n], shape, weight)
    q, k = (_lay(emit, part, [*heads, n], shape, 1.0, like=x) for part in (queries, keys))
    if q is None or k is None or decay is None or len({value(v).dtype for v in (q, k, decay, x)}) != 1:
        return None
    if initial is not None:
        initial = emit.cast(emit.permute(initial, [place - 1 for place in (*heads, n, *columns)]), value(x).dtype)
        initial = merged(emit, initial, len(heads), 1)
    q, k, decay = (merged(emit, v, len(heads), 1) for v in (q, k, decay))
    y, last = lti_chunks.lti_scan(emit, q, k, decay, merged(emit, x, len(heads), 1), initial)
    if read.exclusive:
        y = _one_later(emit, y, emit.call(aten.unsqueeze.default, q, 2), initial, 1)
    return _results(emit, read, rest, shape, (y, [*heads, 0, *columns]), (last, [*heads, n, *columns]))


def _gated(
    emit: Builder, read: Readout, scale: Value | None, offset: Value, shape: list[int], initial: Node | None
) -> tuple[Node, Node] | None:
    """Emit `gated_scan`, if the decay is positive and there is one axis along which only what is added runs."""
    if scale is None or not isinstance(scale.node, Node):
        return None
    rank, n = len(shape), read.summed
    factors = sliced_early(emit, scale.padded(emit, rank - 1))
    weight, decays = terms(emit, factors, tuple(range(rank - value(factors).dim(), rank)))
    if weight <= 0 or not all(_is_positive(term.node) for term in decays):
        return None
    factor, inputs = terms(emit, sliced_early(emit, offset.padded(emit, rank - 1)), tuple(range(rank)))
    keys, values_ = _divide(inputs, n)
    queries, rest = _divide(read.others, n)
    wide = {place for term in (*keys, *queries, *decays) for place in term.spans()}
    heads = [place for place in range(2, rank) if place != n and place in wide]
    channels = [place for place in range(2, rank) if place not in (*heads, n)]
    if len(channels) != 1 or shape[channels[0]] < CHUNK or shape[0] < 2 * CHUNK:
        return None  # the states are hardly larger than what would be computed instead
    rows: list[int | None] = [1, *heads, 0]
    v = _lay(emit, values_, [*rows, *channels], shape, factor)
    if v is None:
        return None
    logs: Node | None = None
    for term in decays:
        part = _lay(emit, [Term(_logarithm(emit, term), term.state_axes)], [*rows, n], shape, 1.0)
        logs = part if logs is None or part is None else emit.call(aten.add.Tensor, logs, part)
    q, k = (_lay(emit, part, [*rows, n], shape, 1.0, like=v) for part in (queries, keys))
    if q is None or k is None or logs is None or len({value(x).dtype for x in (q, k, v, logs)}) != 1:
        return None
    if weight != 1.0:
        logs = emit.call(aten.add.Tensor, logs, log(weight))
    state_order = [1, *heads, n, *channels]
    if initial is not None:
        initial = emit.cast(emit.permute(initial, [place - 1 for place in state_order]), value(v).dtype)
        initial = merged(emit, initial, 1 + len(heads))
    q, k, v, logs = (merged(emit, x, 1 + len(heads)) for x in (q, k, v, logs))
    y, last = gated_scan(emit, _next(emit, q) if read.exclusive else q, k, v, logs, initial)
    if read.exclusive:
        y = _one_later(emit, y, emit.call(aten.unsqueeze.default, emit.call(aten.select.int, q, 1, 0), 2), initial, 1)
    return _results(emit, read, rest, shape, (y, [1, *heads, 0, *channels]), (last, state_order))


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
    emit: Builder, node: Any, state_axes: tuple[int | None, ...], n: int
) -> tuple[tuple[float, list[Term]], tuple[float, list[Term]]] | None:
    """Read a decay as exp of a product times factors that do not run along ``n``: (exponent, other factors)."""
    scale, parts = terms(emit, node, state_axes)
    if scale == 1.0 and len(parts) == 1 and (exponent := _exponent(emit, parts[0])) is not None:
        return exponent, (1.0, [])
    powers, others = _divide(parts, n)
    if not powers:
        return (0.0, []), (scale, others)
    exponent = _exponent(emit, powers[0]) if len(powers) == 1 else None
    return None if exponent is None else (exponent, (scale, others))


def _is_positive(node: Node) -> bool:
    """Tell whether a value is never negative, whatever the inputs."""
    return sign(node).nonnegative


def _log_decay(
    emit: Builder,
    decays: list[Term],
    weight: float,
    per_step: list[Any],
    per_head: list[Any],
    shape: list[int],
    x: Node,
) -> tuple[Node, Node, Node] | None:
    """Return x, dt and A for decays that are no ``exp(dt * A)``: their logarithm is A, or dt if it depends on time.

    dt has the axes ``per_step``, A the axes ``per_head``, and x those of dt and one more.

    The operator multiplies x by dt, so x is divided by it. The gradient of dt then is a difference of large numbers
    where dt is small. Where a gradient is taken, there is no such way but for decays whose derivative is as small.
    """
    timed = any(term.spans() & {0, 1} for term in decays)
    order = per_step if timed else per_head
    total = _constant(emit, x, [1 if place is None else shape[place] for place in order], log(weight))
    for term in decays:
        laid = _lay(emit, [Term(_logarithm(emit, term), term.state_axes)], order, shape, 1.0)
        if laid is None:
            return None
        total = emit.call(aten.add.Tensor, total, laid)
    sizes = [1 if place is None else shape[place] for place in per_step]
    heads = [1 if place is None else shape[place] for place in per_head]
    if not timed:
        bounded = emit.call(aten.clamp_min.default, total, forgets(value(x).dtype))
        return x, _constant(emit, x, sizes, 1.0), bounded
    if value(x).dtype == torch.float16:  # a small reciprocal overflows
        return None
    if torch.is_grad_enabled() and not all(_fades_near_one(term.node) for term in decays):
        return None
    dt, rate = divisor(emit.call, total)
    return emit.call(aten.div.Tensor, x, emit.reshape(dt, [*sizes, 1])), dt, _constant(emit, x, heads, rate)


def _fades_near_one(decay: Node) -> bool:
    """Tell whether the derivative of a decay is as small as what is missing to one."""
    inner = _unalias(decay)
    return inner.target is aten.sigmoid.default or (inner.target is aten.exp.default and fades(arg(inner, 0)))


def _logarithm(emit: Builder, term: Term) -> Node:
    """Return the logarithm of a factor: of zero minus infinity, and none below that of the smallest normal number."""
    inner = _unalias(term.node)
    if inner.target is aten.exp.default and value(inner).dim() == len(term.state_axes):
        return arg(inner, 0)
    val = value(term.node)
    log = emit.call(aten.log.default, emit.call(aten.clamp_min.default, term.node, torch.finfo(val.dtype).tiny))
    never = emit.call(aten.full.default, [], -inf, dtype=val.dtype, device=val.device)
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


def _exponent(emit: Builder, term: Term) -> tuple[float, list[Term]] | None:
    """Read a factor as exp of a product: (scale, factors of the exponent)."""
    inner = _unalias(term.node)
    if inner.target is not aten.exp.default or value(inner).dim() != len(term.state_axes):
        return None
    return terms(emit, arg(inner, 0), term.state_axes)


def _divide(parts: list[Term], n: int) -> tuple[list[Term], list[Term]]:
    """Split factors into those that run along n and the others."""
    return [term for term in parts if n in term.spans()], [term for term in parts if n not in term.spans()]


def _lay(
    emit: Builder, parts: list[Term], order: list[int | None], shape: list[int], scale: float,
    like: Node | None = None, dense: bool = True,
) -> Node | None:  # fmt: skip
    """Multiply factors and lay the product out over axes of the states; None in the order is an axis of size one."""
    sizes = [1 if place is None else shape[place] for place in order]
    total: Node | None = None
    for term in parts:
        axes = [i for i, place in enumerate(term.state_axes) if place is not None]
        x = emit.reshape(term.node, [value(term.node).shape[i] for i in axes])
        state_axes = [term.state_axes[i] for i in axes]
        if any(place not in order for place in state_axes):
            return None
        x = emit.permute(x, [state_axes.index(place) for place in order if place in state_axes])
        x = emit.reshape(x, [size if place in state_axes else 1 for place, size in zip(order, sizes, strict=True)])
        total = x if total is None else emit.call(aten.mul.Tensor, total, x)
    if total is None:
        return None if like is None else _constant(emit, like, sizes, scale)
    if scale != 1.0:
        total = emit.call(aten.mul.Tensor, total, scale)
    return emit.expand(total, sizes) if dense else total


def _constant(emit: Builder, like: Node, sizes: list[int], number: float) -> Node:
    val = value(like)
    return emit.call(aten.full.default, sizes, number, dtype=val.dtype, device=val.device)
