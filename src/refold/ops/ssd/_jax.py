"""State space duality as matrix products for XLA: no custom kernel, any device.

With ``c`` the cumulative log decay of a chunk, a chunk's output is a masked product of ``C Bᵀ`` (computed once per
group) with its inputs, plus ``C`` times the state that enters it. The entering states of all chunks of a segment come
from one small product with the matrix of decays between chunks. Segments follow each other in a ``lax.scan``, so memory
does not grow with the square of the length. Decays stay in log space and float32 until they multiply.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from refold.ops.jax.careful import careful
from refold.ops.jax.layout import (
    Array,
    accumulator,
    finish,
    finite_rates,
    is_known,
    over_time,
    pack_chunks,
    pad_time,
    product,
    read_state,
    step_sizes,
    vary_like,
)
from refold.ops.lines import Line
from refold.ops.ssd.nonfinite import Bad, spoiled_gradients, spoiled_results

BLOCK = 16
"""Tokens of a chunk over which gradients of log decays are summed first."""

SEGMENT_CHUNKS = 64
"""Chunks whose states are passed on by one matrix product; more of them are scanned."""

SYMBOLIC_SEGMENT_CHUNKS = 4
"""The same where the length is a symbol: a sequence is then padded to whole segments, however short it is."""


@partial(jax.jit, static_argnames=("dt_softplus", "dt_limit", "chunk_size", "state_dtype"))
def ssd(
    x: Array, dt: Array, A: Array, B: Array, C: Array, *, D: Array | None = None, z: Array | None = None,
    dt_bias: Array | None = None, dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, math.inf),
    initial_state: Array | None = None, cu_seqlens: Array | None = None, chunk_size: int | None = None,
    state_dtype: Any = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Compute :func:`refold.ops.ssd` on JAX arrays; see there for the equations and the arguments."""
    batch, seqlen, nheads, headdim = x.shape
    dstate = B.shape[3]
    acc = accumulator(x.dtype)
    # 64 is cheapest on a CPU; elsewhere, 128 balances decay matrices against chunk states.
    chunk = chunk_size or (64 if jax.default_backend() == "cpu" else 128)
    chunk = min(chunk, seqlen) if is_known(seqlen) else chunk

    d = step_sizes(dt, dt_bias, dt_softplus, dt_limit, acc)
    log_decay = d * finite_rates(A, acc)
    inputs: list[Array] = [x, d, log_decay, B, C]
    if jax.default_backend() == "cpu":  # no 16-bit matrix units: XLA would widen each product, and round in between
        inputs = [a.astype(acc) for a in inputs]
    nseq = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    none = jnp.zeros((nseq, nheads, headdim, dstate), acc)
    inputs.append(none if initial_state is None else initial_state.astype(acc))
    inputs = [vary_like(a, *(other for other in inputs if other is not a)) for a in inputs]
    y, final = _careful(chunk, tuple(inputs), cu_seqlens)
    return finish(y, x, _by_channel(D), z).astype(x.dtype), final.astype(state_dtype or acc)


def _core(chunk: int, cu_seqlens: Array | None, *operands: Array) -> tuple[Array, Array]:
    """Return y before skip and gate, and the final states, of finite x, steps, log decays, B, C and states."""
    *inputs, state = operands
    x, dt, _, B, _ = inputs
    batch, seqlen, nheads, headdim = x.shape
    ngroups, dstate = B.shape[2:]
    acc = dt.dtype
    shape = (ngroups, nheads // ngroups)  # heads as (g, r): r heads read one group
    pack, finals, own = None, None, None
    if cu_seqlens is None:
        nchunks = -(-seqlen // chunk)
    else:
        pack = pack_chunks(cu_seqlens, seqlen, chunk)
        nchunks = pack.sequence.shape[0]
        inputs = [jnp.where(_like(pack.filled, a), a[:, pack.source], 0) for a in inputs]
        finals = own = state

    per_segment = min(nchunks, SEGMENT_CHUNKS) if is_known(nchunks) else SYMBOLIC_SEGMENT_CHUNKS
    nsegments = -(-nchunks // per_segment)

    def segments(a: Array, *tail: int) -> Array:
        """Cut (b, t, ...) to (segments, m, l, *tail)."""
        a = pad_time(a, nsegments * per_segment * chunk)
        a = a.reshape(batch, nsegments, per_segment * chunk, *a.shape[2:]).swapaxes(0, 1)
        return a.reshape(nsegments, batch * per_segment, chunk, *tail)

    per_token = segments(inputs[0], *shape, headdim), *(segments(a, *shape) for a in inputs[1:3])
    per_token += tuple(segments(a, ngroups, dstate) for a in inputs[3:])
    body: Any = partial(_segment, own)
    carry: Any
    if pack is None:
        carry = (state, None)
        chunks = None
    else:
        carry = (jnp.zeros((batch, nheads, headdim, dstate), acc), finals)
        behind = nsegments * per_segment - nchunks  # chunks of no sequence that fill the last segment
        borders = jnp.stack([jnp.full(behind, pack.nsequences), *2 * [jnp.zeros(behind, int)]])
        chunks = jnp.concatenate([jnp.stack([pack.sequence, pack.first, pack.last]), borders], 1)
        chunks = chunks.reshape(3, nsegments, per_segment).swapaxes(0, 1)

    if is_known(nsegments) and nsegments == 1:
        carry, y = body(carry, (*(a[0] for a in per_token), None if chunks is None else chunks[0]))
    else:
        carry = jax.tree.map(lambda a: vary_like(a, *operands, cu_seqlens), carry)
        carry, y = jax.lax.scan(jax.checkpoint(body), carry, (*per_token, chunks))
    y = y.reshape(nsegments, batch, -1, nheads, headdim).swapaxes(0, 1).reshape(batch, -1, nheads, headdim)
    y = y[:, :seqlen] if pack is None else y[:, pack.target]
    return y, carry[0] if pack is None else carry[1]


def _spoiled(tokens: Line, bad: Bad, operands: tuple[Array, ...]) -> tuple[Array, ...]:
    spoiled = spoiled_gradients(tokens, bad)
    # X is x times a step: a bad step spoils the gradient of x, and a bad x that of the step.
    of_x = spoiled["X"] | ~jnp.isfinite(operands[1])[..., None]
    of_step = (spoiled["X"] | _bad_x(bad, operands)).any(-1)
    return of_x, of_step, *(spoiled[name] for name in ("log_decay", "B", "C", "initial_state"))


def _bad(_: int, operands: tuple[Array, ...]) -> Bad:
    x, dt, log_decay, B, C, state = operands
    X, B, C, state = (~jnp.isfinite(a) for a in (x * dt[..., None], B, C, state))
    return Bad(X, jnp.isnan(log_decay) | (log_decay == jnp.inf), B, C, state)


def _without(bad: Bad, operands: tuple[Array, ...]) -> tuple[Array, ...]:
    _, dt, *_ = operands
    marks = _bad_x(bad, operands), ~jnp.isfinite(dt), bad.decay, bad.B, bad.C, bad.initial
    return tuple(jnp.where(mark, 0, a) for mark, a in zip(marks, operands, strict=True))


def _bad_x(bad: Bad, operands: tuple[Array, ...]) -> Array:
    """Return which x are not finite, or overflow with their step; not those whose step is bad."""
    x, dt, *_ = operands
    return ~jnp.isfinite(x) | (bad.X & jnp.isfinite(dt)[..., None])


_careful = careful(_core, _bad, _without, spoiled_results, _spoiled)


def _like(mask: Array, a: Array) -> Array:
    """Shape a mask over time so that it broadcasts against ``a`` (b, t, ...)."""
    return mask.reshape(1, -1, *[1] * (a.ndim - 2))


def _by_channel(D: Array | None) -> Array | None:
    return D if D is None or D.ndim == 2 else D[:, None]


def _segment(initial: Array | None, carry: Any, inputs: Any) -> tuple[Any, Array]:
    """Run the chunks of one segment.

    No value has more than five axes: chunks of all rows lie on one axis ``m = b c``, and heads of all groups on one,
    ``h = g r``, where groups do not matter. Gradients under ``vmap`` have one more, and XLA's CPU backend (jaxlib
    0.10.2) crashes in sums of products over seven axes.

    Args:
        initial: Initial state of each sequence of a pack, ``(k, h, p, n)``; None without a pack.
        carry: State entering the segment, ``(b, h, p, n)``, and the final states of a pack.
        inputs: ``x (m, l, g, r, p)``, ``dt`` and log decays ``(m, l, g, r)``, ``B`` and ``C (m, l, g, n)``, and for a
            pack each chunk's sequence, whether it is the sequence's first, and whether its last, ``(3, c)``.

    Returns:
        The carry, and ``y (m, l, g, r, p)`` without skip and gate, in the accumulator's dtype.
    """
    entering, finals = carry
    x, dt, log_decay, B, C, chunks = inputs
    batch, length = entering.shape[0], x.shape[1]
    nchunks = x.shape[0] // batch

    # 1. Log decays between tokens, from the chunk's begin, to its end, and of all of it.
    causal = jnp.tril(jnp.ones((length, length), bool))
    between, within, after = _log_decays(log_decay)  # (m, g, r, l, s), (m, g, r, l), (m, g, r, s)
    total = within[..., -1].reshape(batch, nchunks, -1)  # (b, c, h)

    # 2. What each chunk adds to the state.
    to_end = jnp.exp(after).transpose(0, 3, 1, 2)  # (m, s, g, r)
    states = product("msgrp,msgn->mgrpn", (x * (dt * to_end)[..., None]).astype(x.dtype), B)
    matrix, states = states.shape, states.reshape(batch, nchunks, -1, *states.shape[-2:])  # (b, c, h, p, n)

    # 3. The state that enters each chunk: what the chunks before it added, and what entered their sequence.
    before = jnp.tril(jnp.ones((nchunks, nchunks), bool), -1)  # (c, j): chunk j comes before chunk c
    same, entry = before, entering[:, None]
    if chunks is not None and initial is not None:
        sequence, first, last = chunks
        alike = sequence[:, None] == sequence
        same = before & alike
        begun = jnp.any(alike & (first > 0), axis=1).reshape(1, -1, 1, 1, 1)
        entry = jnp.where(begun, initial[jnp.minimum(sequence, initial.shape[0] - 1)], entry)
    since = product("cm,bmh->bch", same.astype(total.dtype), total)
    prefix = product("bhcj,bjhpn->bchpn", jnp.exp(jnp.where(same, _sums_between(total), -jnp.inf)), states)
    prefix = prefix + jnp.exp(since)[..., None, None] * entry
    leaving = jnp.exp(total)[..., None, None] * prefix + states  # (b, c, h, p, n)
    if chunks is not None:
        finals = finals.at[jnp.where(last > 0, sequence, finals.shape[0])].set(leaving[0], mode="drop")

    # 4. Output: inside the chunk through C Bᵀ, from before through the entering state.
    scores = jnp.where(causal, product("mlgn,msgn->mgls", C, B), 0)
    decay = jnp.exp(jnp.where(causal, between, -jnp.inf))
    weights = scores[:, :, None] * decay * dt.transpose(0, 2, 3, 1)[..., None, :]  # (m, g, r, l, s)
    y = product("mgrls,msgrp->mlgrp", weights.astype(x.dtype), x)
    carried = product("mlgn,mgrpn->mlgrp", C, prefix.reshape(matrix).astype(C.dtype))
    y = y + carried * jnp.exp(within).transpose(0, 3, 1, 2)[..., None]
    return (leaving[:, -1], finals), y


@jax.custom_jvp
def _log_decays(log_decay: Array) -> tuple[Array, Array, Array]:
    """Return the sums of ``log_decay (m, l, g, r)`` between two tokens of a chunk, and to its ends.

    Returns:
        From after token s to token l, ``(m, g, r, l, s)``, valid if s comes before l; up to token l,
        ``(m, g, r, l)``; from after token s on, ``(m, g, r, s)``.
    """
    coarse, fine = _cumulative(log_decay)  # their sum is what is meant
    between = (coarse[..., :, None] - coarse[..., None, :]) + (fine[..., :, None] - fine[..., None, :])
    return between, coarse + fine, (coarse[..., -1:] - coarse) + (fine[..., -1:] - fine)


@_log_decays.defjvp
def _log_decays_jvp(primals: Any, tangents: Any) -> Any:
    """Differentiate term by term: in gradients, differences of sums would cancel where decays are strong.

    Between two tokens of different blocks lie the end of one, whole blocks, and the begin of the other. So a gradient
    of all pairs is first summed over blocks, and no product with a triangle of ones over all tokens is needed.
    """
    change = jnp.moveaxis(tangents[0], 1, -1)  # (m, g, r, k)
    length = change.shape[-1]
    block = math.gcd(length, BLOCK)
    blocks = change.reshape(-1, length // block, block)  # (M, i, k)
    upto = jnp.tril(jnp.ones((block, block), change.dtype))  # row not before column
    strict = upto - jnp.eye(block, dtype=change.dtype)
    head, tail = product("ak,Mik->Mia", upto, blocks), product("kb,Mik->Mib", strict, blocks)
    own = product("ak,Mikb->Miab", upto, blocks[..., None] * strict)
    nblocks = length // block
    whole = _sums_between(blocks.sum(-1)[..., None])[:, 0]  # (M, i, j): the blocks after j and before i
    i, j = jnp.arange(nblocks)[:, None, None, None], jnp.arange(nblocks)[:, None]
    far = head[:, :, :, None, None] + tail[:, None, None] + whole[:, :, None, :, None]
    between = jnp.where(i > j, far, jnp.where(i == j, own[:, :, :, None], 0))
    before = jnp.tril(jnp.ones((nblocks, nblocks), change.dtype), -1)
    sums = blocks.sum(-1)
    within = head + product("ij,Mj->Mi", before, sums)[..., None]
    after = tail + product("ji,Mj->Mi", before, sums)[..., None]
    shape = change.shape
    return _log_decays(*primals), (between.reshape(*shape, length), within.reshape(shape), after.reshape(shape))


def _cumulative(log_decay: Array) -> tuple[Array, Array]:
    """Return the cumulative sums of ``log_decay (m, l, g, r)`` over l as two parts, ``(m, g, r, l)`` each.

    A difference of plain float32 sums loses the small decays that follow large ones. Here each term is a multiple of
    a quantum, so coarse that all sums of multiples are exact, and a rest smaller than half of it. Terms are clipped
    where the exponential is zero or infinite anyway: exp(±128) in float32, exp(±1024) in float64.
    """
    length = log_decay.shape[1]
    number = jnp.finfo(log_decay.dtype)
    quantum = 2.0 ** (math.ceil(math.log2(number.maxexp * length)) - number.nmant - 1)
    log_decay = jnp.clip(log_decay, -number.maxexp, number.maxexp)
    coarse = jnp.round(log_decay / quantum) * quantum
    parts = jnp.stack([coarse, log_decay - coarse])
    coarse, fine = product("ls,kmsgr->kmgrl", jnp.tril(jnp.ones((length, length), log_decay.dtype)), parts)
    return coarse, fine


def _sums_between(total: Array) -> Array:
    """Return the sum of ``total[m]`` over ``j < m < c`` as ``(b, h, c, j)``.

    Summed term by term rather than as a difference of cumulative sums, which would cancel over a long segment.
    """
    nchunks = total.shape[1]
    before = jnp.tril(jnp.ones((nchunks, nchunks), bool), -1)
    terms = jnp.where(before, jnp.moveaxis(total, 1, -1)[..., None], 0)  # (b, h, m, j)
    return product("cm,bhmj->bhcj", before.astype(total.dtype), terms)


@partial(jax.jit, static_argnames=("dt_softplus", "dt_limit"))
def ssd_step(
    x: Array, dt: Array, A: Array, B: Array, C: Array, state: Array, *, D: Array | None = None, z: Array | None = None,
    dt_bias: Array | None = None, dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, math.inf),
) -> tuple[Array, Array]:  # fmt: skip
    """Compute :func:`refold.ops.ssd_step` on JAX arrays: a true step, O(h p n), or a short run of them.

    Takes ``x (b, h, p)`` or ``(b, t, h, p)``, the other inputs alike; returns ``y`` like ``x`` and the new state in
    ``state``'s dtype. The output is read from the state before it is rounded.
    """
    if x.ndim == 4:
        step = partial(ssd_step, A=A, D=D, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit)
        state = vary_like(state, x, dt, A, B, dt_bias)
        return over_time(step, state, {"x": x, "dt": dt, "B": B, "C": C, "z": z})

    acc = accumulator(x.dtype)
    d = step_sizes(dt, dt_bias, dt_softplus, dt_limit, acc)
    decay, dx = jnp.exp(d * finite_rates(A, acc)), d[..., None] * x.astype(acc)
    B, C = (jnp.repeat(a.astype(acc), x.shape[1] // a.shape[1], axis=1) for a in (B, C))  # (b, h, n)
    new = decay[..., None, None] * state.astype(acc) + dx[..., None] * B[:, :, None]
    y = read_state(new, C)
    return finish(y, x, _by_channel(D), z).astype(x.dtype), new.astype(state.dtype)
