"""Scans whose decay varies along the axis that is contracted, by chunks of time, without writing their states.

Gated linear attention keeps states ``S[k, v]`` with a decay for each key: ``S = a[t, k] * S + key[t, k] value[t, v]``.
Only ``y[t, v] = sum over k of query[t, k] * S[k, v]`` is read of them. Within a chunk, with ``G`` the running sum of
the log decays from its start,

    y[i] = sum over j <= i of (sum over k of query[i, k] key[j, k] exp(G[i, k] - G[j, k])) value[j]
           + sum over k of query[i, k] exp(G[i, k]) S0[k],

where S0 are the states that enter the chunk: one `linear_scan` over chunks. Exponents are sums of log decays between
two positions of one chunk, so nothing overflows that would not in the loop. ``exp(G[i]) exp(-G[j])``, which would make
the first term a matrix product, does overflow. Differences are taken in float64, as strong decays next to weak ones
may cancel; of float64 itself in two parts. Source: Yang et al. 2024 (arXiv:2312.06635), section 4;
there the first term is cut once more, here its pairs are written out.

A product with zero is no mask: zero times infinity is not a number. So a value that a position must not see is replaced
before it is multiplied. A log decay of minus infinity, which forgets the state, is replaced by a finite one whose
exponential is zero, too.

Shapes. Query, key and log decays are (b, c, l, k), values (b, c, l, v), states (b, c, k, v), pairs (b, c, l, l): c
chunks of l tokens. Several axes may stand for the batch b. Design decision 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from math import inf, nan, prod
from operator import getitem

import torch
from torch.fx import Node

from ..ir.builder import Builder
from ..ir.fx import value
from ..ir.operators import SCAN

aten = torch.ops.aten

# Positions of a chunk: their pairs are computed one by one for each key, their states are kept one per chunk.
CHUNK = 16
# The exponential of this log decay is zero in every precision, and sums of a chunk of them are exact enough.
FORGETS = -1e4


def gated_scan(
    emit: Builder, queries: Node, keys: Node, values: Node, logs: Node, initial: Node | None
) -> tuple[Node, Node]:
    """Emit the scan.

    Args:
        emit: Where to.
        queries: ``(rows, time, k)``, as are the next.
        keys: What the state gets, along k.
        values: What the state gets, along v: ``(rows, time, v)``.
        logs: Log decays.
        initial: The state before the first, ``(rows, k, v)``; None for zeros.

    Returns:
        ``y (rows, time, v)`` and the last state.
    """
    (rows, steps, k), v = value(keys).shape, value(values).shape[2]
    chunks = -(-steps // CHUNK)
    bounded = emit.call(aten.clamp_min.default, logs, FORGETS)
    q, key, x, g = (_chunked(emit, part, chunks) for part in (queries, keys, values, bounded))
    key, key_unbounded = finite_part(emit, key, 2)
    x, x_unbounded = finite_part(emit, x, 2)
    sums = _running_sums(emit, g)

    def end(part: Node) -> Node:
        """Take the values at the end of each chunk: (b, c, l, k) becomes (b, c, 1, k)."""
        return emit.call(aten.slice.Tensor, part, 2, CHUNK - 1, CHUNK)

    def decay(exponent: Node) -> Node:
        return emit.call(aten.exp.default, emit.cast(exponent, value(x).dtype))

    def times(a: Node, b: Node) -> Node:
        return emit.call(aten.mul.Tensor, a, b)

    def plus(parts: Sequence[Node]) -> Node:
        return reduce(partial(emit.call, aten.add.Tensor), parts)

    def product(a: Node, b: Node) -> Node:
        """Multiply the matrices of all chunks, (b, c, m, n) and (b, c, n, o)."""
        a, b = (emit.reshape(m, [rows * chunks, *value(m).shape[2:]]) for m in (a, b))
        out = emit.call(aten.bmm.default, a, b)
        return emit.reshape(out, [rows, chunks, *value(out).shape[1:]])

    # Within a chunk: pairs of positions, the later one in front.
    apart = [[emit.call(aten.unsqueeze.default, part, dim) for dim in (3, 2)] for part in sums]
    between = plus([emit.call(aten.sub.Tensor, later, earlier) for later, earlier in apart])
    never = emit.call(aten.full.default, [], -inf, dtype=torch.float64, device=value(x).device)
    causal = _causal(emit, x)
    between = emit.call(aten.where.self, causal, between, never)
    zero = emit.call(aten.full.default, [], 0.0, dtype=value(x).dtype, device=value(x).device)
    earlier = emit.call(aten.where.self, causal, emit.call(aten.unsqueeze.default, key, 2), zero)
    pairs = times(emit.call(aten.unsqueeze.default, q, 3), earlier)
    scores = emit.call(aten.sum.dim_IntList, times(pairs, decay(between)), [-1])
    scores = emit.call(aten.where.self, emit.reshape(causal, [CHUNK, CHUNK]), scores, zero)
    any_key = emit.call(aten.sum.dim_IntList, key_unbounded, [-1], True)
    near = plus([product(scores, x), x_unbounded, any_key])
    # What a chunk adds to the state, and the states that enter the chunks.
    ends = [end(part) for part in sums]
    until = plus([emit.call(aten.sub.Tensor, end, part) for end, part in zip(ends, sums, strict=True)])
    left = times(key, decay(until))
    key_lost = emit.permute(end(key_unbounded), [0, 1, 3, 2])
    added = plus([product(emit.permute(left, [0, 1, 3, 2]), x), end(x_unbounded), key_lost])
    whole = emit.expand(emit.reshape(decay(plus(ends)), [rows, chunks, k, 1]), [rows, chunks, k, v])
    if initial is None:
        initial = emit.call(aten.full.default, [rows, k, v], 0.0, dtype=value(x).dtype, device=value(x).device)
    dense = [emit.call(aten.clone.default, m, memory_format=torch.contiguous_format) for m in (whole, added, initial)]
    scan = emit.call(SCAN.target, *SCAN.args(a=dense[0], x=dense[1], initial_state=dense[2]))
    states, last = (emit.call(getitem, scan, i) for i in (0, 1))
    before = emit.call(aten.slice.Tensor, states, 1, 0, chunks - 1)
    entering = emit.call(aten.cat.default, [emit.call(aten.unsqueeze.default, initial, 1), before], 1)
    far = product(times(q, decay(plus(sums))), entering)
    y = emit.reshape(emit.call(aten.add.Tensor, near, far), [rows, chunks * CHUNK, v])
    return (
        y if isinstance(steps, int) and chunks * CHUNK == steps else emit.call(aten.slice.Tensor, y, 1, 0, steps)
    ), last


def finite_part(emit: Builder, x: Node, time: int) -> tuple[Node, Node]:
    """Split values so that a product over all of a time axis can be causal: zeros of a matrix do not stop infinities.

    Returns:
        The values, with zeros for those that are not finite; and what is to be added to the product: NaN from the first
        value on that is not finite, zero before.
    """
    val = value(x)
    zero, never = (emit.call(aten.full.default, [], c, dtype=val.dtype, device=val.device) for c in (0.0, nan))
    finite = emit.call(aten.lt.Scalar, emit.call(aten.abs.default, x), inf)
    since = emit.call(aten.cumsum.default, emit.call(aten.where.self, finite, zero, never), time)
    return emit.call(aten.where.self, finite, x, zero), since


def _chunked(emit: Builder, x: Node, chunks: int) -> Node:
    """Cut (b, t, k) into chunks, (b, c, l, k); what is missing of the last one neither decays nor adds anything."""
    rows, steps, width = value(x).shape
    if not isinstance(steps, int) or steps != chunks * CHUNK:  # of a symbolic length it may be nothing
        kind = {"dtype": value(x).dtype, "device": value(x).device}
        missing = emit.call(aten.full.default, [rows, chunks * CHUNK - steps, width], 0.0, **kind)
        x = emit.call(aten.cat.default, [x, missing], 1)
    return emit.reshape(x, [rows, chunks, CHUNK, width])


def _running_sums(emit: Builder, g: Node) -> list[Node]:
    """Sum log decays (b, c, l, k) from the start of each chunk in float64.

    If they are float64 themselves, what the sums lose is summed separately, and returned as a second tensor.
    """
    wide = emit.cast(g, torch.float64)
    total = emit.call(aten.cumsum.default, wide, 2)
    if value(g).dtype != torch.float64:
        return [total]
    before = emit.call(aten.constant_pad_nd.default, total, [0, 0, 1, -1], 0.0)
    lost = emit.call(aten.sub.Tensor, wide, emit.call(aten.sub.Tensor, total, before))
    return [total, emit.call(aten.cumsum.default, lost, 2)]


def _causal(emit: Builder, like: Node) -> Node:
    """Return which position of a chunk, the first axis, is not before which, the second: (l, l, 1)."""
    at = emit.positions(CHUNK, value(like).device)
    rows, columns = (emit.reshape(at, shape) for shape in ([CHUNK, 1, 1], [1, CHUNK, 1]))
    return emit.call(aten.ge.Tensor, rows, columns)


def merged(emit: Builder, x: Node, leading: int, kept: int = 2) -> Node:
    """Merge the leading axes into one, and, after those that are kept, the others into one."""
    shape: Sequence[int] = value(x).shape
    front, rest = leading + kept, shape[leading + kept :]
    return emit.reshape(x, [prod(shape[:leading]), *shape[leading:front], *([prod(rest)] if rest else [])])
