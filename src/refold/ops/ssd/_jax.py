"""State space duality as matrix products that XLA knows well: no custom kernel, any device.

With ``c`` the cumulative log decay of a chunk, a chunk's output is a masked product of ``C Bᵀ`` (computed once per
group) with its inputs, plus ``C`` times the state that enters it. The entering states of all chunks of a segment come
from one small product with the matrix of decays between chunks; segments follow each other in a ``lax.scan``, so
memory does not grow with the square of the length. Decays stay in log space and float32 until they multiply.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from refold.ops._jax_layout import Array, accumulator, pack_chunks, pad_time, product, read_state, step_sizes

SEGMENT_CHUNKS = 64
"""Chunks whose states are passed on by one matrix product; more of them are scanned."""


def default_chunk_size() -> int:
    """Return 64 on CPU (cheapest there), 128 elsewhere (it balances decay matrices against chunk states)."""
    return 64 if jax.default_backend() == "cpu" else 128


@partial(jax.jit, static_argnames=("dt_softplus", "dt_limit", "chunk_size", "state_dtype"))
def ssd(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    *,
    D: Array | None = None,
    z: Array | None = None,
    dt_bias: Array | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    initial_state: Array | None = None,
    cu_seqlens: Array | None = None,
    chunk_size: int | None = None,
    state_dtype: Any = None,
) -> tuple[Array, Array]:
    """Compute :func:`refold.ops.ssd` on JAX arrays; see there for the equations and the arguments."""
    batch, seqlen, nheads, headdim = x.shape
    ngroups, dstate = B.shape[2:]
    acc = accumulator(x.dtype)
    chunk = min(chunk_size or default_chunk_size(), seqlen)
    shape = (ngroups, nheads // ngroups)  # heads as (g, r): r heads read one group

    d = step_sizes(dt, dt_bias, dt_softplus, dt_limit, acc)
    inputs: list[Array] = [x, d, B, C]
    if jax.default_backend() == "cpu":  # no 16-bit matrix units: XLA would widen each product, and round in between
        inputs = [a.astype(acc) for a in inputs]
    pack, finals, own = None, None, None
    state = jnp.zeros((batch, nheads, headdim, dstate), acc) if initial_state is None else initial_state.astype(acc)
    if cu_seqlens is None:
        nchunks = -(-seqlen // chunk)
    else:
        pack = pack_chunks(cu_seqlens, seqlen, chunk)
        nchunks = pack.sequence.shape[0]
        inputs = [jnp.where(_like(pack.filled, a), a[:, pack.source], 0) for a in inputs]
        nseq = cu_seqlens.shape[0] - 1
        if initial_state is None:
            state = jnp.zeros((nseq, nheads, headdim, dstate), acc)
        finals = own = state.reshape(nseq, *shape, headdim, dstate)

    nsegments = -(-nchunks // SEGMENT_CHUNKS)
    per_segment = nchunks if nsegments == 1 else SEGMENT_CHUNKS
    x_, d_, B_, C_ = (
        pad_time(a, nsegments * per_segment * chunk).reshape(batch, nsegments, per_segment, chunk, *tail)
        for a, tail in zip(inputs, [(*shape, headdim), shape, (ngroups, dstate), (ngroups, dstate)], strict=True)
    )
    rates = A.astype(acc).reshape(shape)
    body: Any = partial(_segment, rates, own)
    carry: Any
    if pack is None:
        carry = (state.reshape(batch, *shape, headdim, dstate), None)
        chunks = None
    else:
        carry = (jnp.zeros((batch, *shape, headdim, dstate), acc), finals)
        behind = nsegments * per_segment - nchunks  # chunks of no sequence that fill the last segment
        borders = jnp.array([pack.nsequences, 0, 0])[:, None] * jnp.ones(behind, int)
        chunks = jnp.concatenate([jnp.stack([pack.sequence, pack.first, pack.last]), borders], 1)
        chunks = chunks.reshape(3, nsegments, per_segment)

    if nsegments == 1:
        carry, y = body(carry, (x_[:, 0], d_[:, 0], B_[:, 0], C_[:, 0], None if chunks is None else chunks[:, 0]))
    else:
        first = [jnp.moveaxis(a, 1, 0) for a in (x_, d_, B_, C_)]
        chunks = None if chunks is None else jnp.moveaxis(chunks, 1, 0)
        carry, y = jax.lax.scan(jax.checkpoint(body), carry, (*first, chunks))
        y = jnp.moveaxis(y, 0, 1)
    y = y.reshape(batch, -1, nheads, headdim)
    y = y[:, :seqlen] if pack is None else y[:, pack.target]
    final = carry[0] if pack is None else carry[1]
    final = final.reshape(-1, nheads, headdim, dstate).astype(state_dtype or acc)
    return _finish(y, x, D, z).astype(x.dtype), final


def _like(mask: Array, a: Array) -> Array:
    """Shape a mask over time so that it broadcasts against ``a`` (b, t, ...)."""
    return mask.reshape(1, -1, *[1] * (a.ndim - 2))


def _finish(y: Array, x: Array, D: Array | None, z: Array | None) -> Array:
    """Add the skip ``D x`` and multiply by ``silu(z)``, in y's dtype."""
    if D is not None:
        y = y + (D if D.ndim == 2 else D[:, None]).astype(y.dtype) * x.astype(y.dtype)
    if z is not None:
        y = y * jax.nn.silu(z.astype(y.dtype))
    return y


def _segment(A: Array, initial: Array | None, carry: Any, inputs: Any) -> tuple[Any, Array]:
    """Run the chunks of one segment.

    Args:
        A: Rates, ``(g, r)``.
        initial: Initial state of each sequence of a pack, ``(k, g, r, p, n)``; None without a pack.
        carry: State entering the segment, ``(b, g, r, p, n)``, and the final states of a pack.
        inputs: ``x (b, c, l, g, r, p)``, ``dt (b, c, l, g, r)``, ``B`` and ``C (b, c, l, g, n)``, and for a pack each
            chunk's sequence, whether it is the sequence's first, and whether its last, ``(3, c)``.

    Returns:
        The carry, and ``y (b, c, l, g, r, p)`` without skip and gate, in the accumulator's dtype.
    """
    entering, finals = carry
    x, dt, B, C, chunks = inputs
    nchunks, length = x.shape[1:3]

    # 1. Cumulative log decay of each chunk, and its total.
    causal = jnp.tril(jnp.ones((length, length), bool))
    coarse, fine = _cumulative(dt * A, causal)  # (b, c, g, r, l) each; their sum is what is meant
    within = coarse + fine
    total = within[..., -1]  # (b, c, g, r)

    # 2. What each chunk adds to the state.
    to_end = jnp.exp((coarse[..., -1:] - coarse) + (fine[..., -1:] - fine)).transpose(0, 1, 4, 2, 3)  # (b, c, s, g, r)
    states = product("bcsgrp,bcsgn->bcgrpn", (x * (dt * to_end)[..., None]).astype(x.dtype), B)

    # 3. The state that enters each chunk: what the chunks before it added, and what entered their sequence.
    before = jnp.tril(jnp.ones((nchunks, nchunks), bool), -1)  # (c, j): chunk j comes before chunk c
    same, entry = before, entering[:, None]
    if chunks is not None and initial is not None:
        sequence, first, last = chunks
        alike = sequence[:, None] == sequence
        same = before & alike
        begun = jnp.any(alike & (first > 0), axis=1).reshape(1, -1, 1, 1, 1, 1)
        entry = jnp.where(begun, initial[jnp.minimum(sequence, len(initial) - 1)], entry)
    since = product("cm,bmgr->bcgr", same.astype(total.dtype), total)
    prefix = product("bgrcj,bjgrpn->bcgrpn", jnp.exp(jnp.where(same, _sums_between(total), -jnp.inf)), states)
    prefix = prefix + jnp.exp(since)[..., None, None] * entry
    leaving = jnp.exp(total)[..., None, None] * prefix + states  # (b, c, g, r, p, n)
    if chunks is not None:
        finals = finals.at[jnp.where(last > 0, sequence, len(finals))].set(leaving[0], mode="drop")

    # 4. Output: inside the chunk through C Bᵀ, from before through the entering state.
    scores = product("bclgn,bcsgn->bcgls", C, B)
    span = (coarse[..., :, None] - coarse[..., None, :]) + (fine[..., :, None] - fine[..., None, :])
    decay = jnp.exp(jnp.where(causal, span, -jnp.inf))
    weights = scores[:, :, :, None] * decay * dt.transpose(0, 1, 3, 4, 2)[..., None, :]  # (b, c, g, r, l, s)
    y = product("bcgrls,bcsgrp->bclgrp", weights.astype(x.dtype), x)
    carried = product("bclgn,bcgrpn->bclgrp", C, prefix.astype(C.dtype))
    y = y + carried * jnp.exp(within).transpose(0, 1, 4, 2, 3)[..., None]
    return (leaving[:, -1], finals), y


def _cumulative(log_decay: Array, causal: Array) -> tuple[Array, Array]:
    """Return the cumulative sums of ``log_decay (b, c, l, g, r)`` over l as two parts, ``(b, c, g, r, l)`` each.

    A difference of plain float32 sums loses the small decays that follow large ones. Here each term is a multiple of
    a quantum, so coarse that all sums of multiples are exact, and a rest smaller than half of it. Terms are clipped
    where the exponential is zero or infinite anyway: exp(±128) in float32, exp(±1024) in float64.
    """
    length = log_decay.shape[2]
    number = jnp.finfo(log_decay.dtype)
    quantum = 2.0 ** (math.ceil(math.log2(number.maxexp * length)) - number.nmant - 1)
    log_decay = jnp.clip(log_decay, -number.maxexp, number.maxexp)
    coarse = jax.lax.stop_gradient(jnp.round(log_decay / quantum) * quantum)
    parts = jnp.stack([coarse, log_decay - coarse])
    coarse, fine = product("ls,kbcsgr->kbcgrl", causal.astype(log_decay.dtype), parts)
    return coarse, fine


def _sums_between(total: Array) -> Array:
    """Return the sum of ``total[m]`` over ``j < m < c`` as ``(b, g, r, c, j)``.

    Summed term by term rather than as a difference of cumulative sums, which would cancel over a long segment.
    """
    nchunks = total.shape[1]
    before = jnp.tril(jnp.ones((nchunks, nchunks), bool), -1)
    terms = jnp.where(before, jnp.moveaxis(total, 1, -1)[..., None], 0)  # (b, g, r, m, j)
    return product("cm,bgrmj->bgrcj", before.astype(total.dtype), terms)


@partial(jax.jit, static_argnames=("dt_softplus", "dt_limit"))
def ssd_step(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    state: Array,
    *,
    D: Array | None = None,
    z: Array | None = None,
    dt_bias: Array | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
) -> tuple[Array, Array]:
    """Compute :func:`refold.ops.ssd_step` on JAX arrays: a true step, O(h p n), or a short run of them.

    Takes ``x (b, h, p)`` or ``(b, t, h, p)``, the other inputs alike; returns ``y`` like ``x`` and the new state in
    ``state``'s dtype. The output is read from the state before it is rounded.
    """
    if x.ndim == 4:

        def body(state: Array, inputs: Any) -> tuple[Array, Array]:
            x, dt, B, C, z = inputs
            y, state = ssd_step(
                x, dt, A, B, C, state, D=D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit
            )
            return state, y

        time_first = [None if a is None else jnp.moveaxis(a, 1, 0) for a in (x, dt, B, C, z)]
        state, y = jax.lax.scan(body, state, tuple(time_first))
        return jnp.moveaxis(y, 0, 1), state

    acc = accumulator(x.dtype)
    d = step_sizes(dt, dt_bias, dt_softplus, dt_limit, acc)
    decay, dx = jnp.exp(d * A.astype(acc)), d[..., None] * x.astype(acc)
    B, C = (jnp.repeat(a.astype(acc), x.shape[1] // a.shape[1], axis=1) for a in (B, C))  # (b, h, n)
    new = decay[..., None, None] * state.astype(acc) + dx[..., None] * B[:, :, None]
    y = read_state(new, C)
    return _finish(y, x, D, z).astype(x.dtype), new.astype(state.dtype)
