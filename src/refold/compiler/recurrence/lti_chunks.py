"""Scans that do the same at every step, such as S4D, as matrix products, without writing their states.

The recurrence is ``S[k] = a[k] * S[k] + key[k] x[t]``, ``y[t] = sum over k of query[k] S[k]``. Decay, key and query
depend neither on time nor on the batch. So the map from a chunk's inputs to its outputs is the same for all chunks and
all sequences:

    y[i] = sum over j <= i of (sum over k of query[k] key[k] a[k]^(i - j)) x[j]
           + sum over k of query[k] a[k]^(i + 1) S0[k],

where S0 are the states that enter the chunk: one `linear_scan` over chunks. The first sum is one Toeplitz matrix.
Powers are taken of the decay itself, so it may be zero or negative. Source: Gu et al. 2022 (S4D, arXiv:2206.11893),
whose kernel is the first sum.

Shapes. Inputs are (b, c, l), keys, queries and decays (k,), the Toeplitz matrix (l, l), states (b, c, k). Each may have
axes of channels as well.
"""

from __future__ import annotations

from math import inf, nan
from operator import getitem
from typing import Any

import torch
from torch.fx import Node

from ..ir.builder import Builder
from ..ir.fx import value
from ..ir.operators import SCAN

aten = torch.ops.aten
prims = torch.ops.prims

# Positions of a chunk: as many multiply-adds per output, and one state per chunk.
CHUNK = 64


def lti_scan(emit: Builder, query: Node, key: Node, decay: Node, x: Node, initial: Node | None) -> tuple[Node, Node]:
    """Emit the scan.

    Args:
        emit: Where to.
        query: What reads the states, ``(rows, k)``, as are the next.
        key: What the input is multiplied by.
        decay: What a state is multiplied by.
        x: ``(rows, time, columns)``.
        initial: The state before the first, ``(rows, k, columns)``; None for zeros.

    Returns:
        ``y (rows, time, columns)`` and the last state.
    """
    (rows, steps, columns), k = value(x).shape, value(query).shape[1]
    length = min(CHUNK, steps)
    chunks = -(-steps // length)
    tail = steps - (chunks - 1) * length
    if tail != length:
        x = emit.call(aten.constant_pad_nd.default, x, [0, 0, 0, length - tail], 0.0)

    def call(target: Any, *args: Any) -> Node:
        return emit.call(target, *args)

    def weighted(weights: Node, low: int, high: int) -> Node:
        """Multiply powers of the decay, ``(rows, high - low, k)``."""
        return call(
            aten.mul.Tensor, call(aten.slice.Tensor, powers, 1, low, high), call(aten.unsqueeze.default, weights, 1)
        )

    at = emit.positions(length + 1, value(x).device)
    exponents = emit.reshape(emit.cast(at, value(x).dtype), [1, length + 1, 1])
    powers = call(aten.pow.Tensor_Tensor, call(aten.unsqueeze.default, decay, 1), exponents)  # (rows, length + 1, k)
    # From each input of a chunk to each of its outputs.
    both = call(aten.mul.Tensor, query, key)
    response = call(aten.sum.dim_IntList, weighted(both, 0, length), [-1])
    places = call(aten.slice.Tensor, at, 0, 0, length)
    apart = call(aten.sub.Tensor, emit.reshape(places, [length, 1]), emit.reshape(places, [1, length]))
    toeplitz = call(aten.index.Tensor, response, [None, call(aten.clamp_min.default, apart, 0)])
    zero = emit.full(0.0, x)
    toeplitz = call(aten.where.self, call(aten.ge.Scalar, apart, 0), toeplitz, zero)
    inputs = emit.permute(emit.reshape(x, [rows, chunks, length, columns]), [0, 2, 1, 3])
    inputs = emit.reshape(inputs, [rows, length, chunks * columns])
    seen, unbounded = finite_part(emit, inputs, 1)
    near = call(aten.add.Tensor, call(aten.bmm.default, toeplitz, seen), unbounded)
    # The state at the end of each chunk, and the states that enter the chunks.
    left = call(prims.rev.default, weighted(key, 0, length), [1])
    left = emit.permute(left, [0, 2, 1])
    added = emit.reshape(call(aten.bmm.default, left, inputs), [rows, k, chunks, columns])
    whole = emit.reshape(call(aten.select.int, powers, 1, length), [rows, 1, k, 1])
    if initial is None:
        initial = emit.full(0.0, x, [rows, k, columns])
    parts = emit.expand(whole, [rows, chunks, k, columns]), emit.permute(added, [0, 2, 1, 3]), initial
    dense = [emit.call(aten.clone.default, m, memory_format=torch.contiguous_format) for m in parts]
    scan = call(SCAN.target, *SCAN.args(a=dense[0], x=dense[1], initial_state=dense[2]))
    states, last = (call(getitem, scan, i) for i in (0, 1))
    before = call(aten.slice.Tensor, states, 1, 0, chunks - 1)
    entering = call(aten.cat.default, [call(aten.unsqueeze.default, initial, 1), before], 1)
    far_in = emit.reshape(emit.permute(entering, [0, 2, 1, 3]), [rows, k, chunks * columns])
    far = call(aten.bmm.default, weighted(query, 1, length + 1), far_in)
    y = emit.reshape(call(aten.add.Tensor, near, far), [rows, length, chunks, columns])
    y = emit.reshape(emit.permute(y, [0, 2, 1, 3]), [rows, chunks * length, columns])
    if tail != length:  # the last chunk's end is not the last step
        y = call(aten.slice.Tensor, y, 1, 0, steps)
        kept = call(aten.mul.Tensor, call(aten.unsqueeze.default, call(aten.select.int, powers, 1, tail), 2),
                    call(aten.select.int, entering, 1, chunks - 1))  # fmt: skip
        own = call(aten.slice.Tensor, inputs, 2, (chunks - 1) * columns, chunks * columns)
        own = call(aten.bmm.default, call(aten.slice.Tensor, left, 2, length - tail, length),
                   call(aten.slice.Tensor, own, 1, 0, tail))  # fmt: skip
        last = call(aten.add.Tensor, kept, own)
    return y, last


def finite_part(emit: Builder, x: Node, time: int) -> tuple[Node, Node]:
    """Split values so that a product over all of a time axis can be causal: zeros of a matrix do not stop infinities.

    Design decision 6.

    Returns:
        The values, with zeros for those that are not finite; and what is to be added to the product: NaN from the first
        value on that is not finite, zero before.
    """
    zero, never = (emit.full(c, x) for c in (0.0, nan))
    finite = emit.call(aten.lt.Scalar, emit.call(aten.abs.default, x), inf)
    since = emit.call(aten.cumsum.default, emit.call(aten.where.self, finite, zero, never), time)
    return emit.call(aten.where.self, finite, x, zero), since
