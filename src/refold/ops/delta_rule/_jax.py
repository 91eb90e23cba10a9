"""The delta rule as matrix products for XLA: no custom kernel, any device.

The formulas of the torch backend: the inverse by levels, decays per key by levels of neighbouring blocks, no decay
divided. What tokens of a chunk share is computed for all chunks of a segment at once. Then a scan passes states from
chunk to chunk. JAX derives the backward of that; a segment is computed again there, so memory holds one segment.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from refold.ops.delta_rule.nonfinite import Bad, spoiled_gradients, spoiled_results
from refold.ops.jax.careful import careful
from refold.ops.jax.layout import (
    Array,
    accumulator,
    is_known,
    over_time,
    pack_chunks,
    pad_time,
    product,
    vary_like,
)
from refold.ops.lines import Line

CHUNK_SIZE = 64
SEGMENT_CHUNKS = 32
SYMBOLIC_SEGMENT_CHUNKS = 4
"""Chunks that are computed side by side, and those where one program serves all lengths: it pads to so many."""

_STATIC = ("scale", "normalize", "lower_bound", "beta_limit", "erase")


@partial(jax.jit, static_argnames=(*_STATIC, "chunk_size"))
def delta_rule(
    q: Array, k: Array, v: Array, *, g: Array | None = None, beta: Array | None = None, r: Array | None = None,
    A_log: Array | None = None, dt_bias: Array | None = None, initial_state: Array | None = None,
    cu_seqlens: Array | None = None, scale: float | None = None, normalize: bool = False,
    lower_bound: float | None = None, beta_limit: float | None = None, erase: bool = True,
    chunk_size: int | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Compute :func:`refold.ops.delta_rule` on JAX arrays; see there for the equations and the arguments."""
    acc = accumulator(v.dtype)
    seqlen, dkey = v.shape[1], q.shape[3]
    chunk = chunk_size or CHUNK_SIZE
    chunk = 1 << ((min(chunk, seqlen) if is_known(seqlen) else chunk) - 1).bit_length()
    nseq = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    none = jnp.zeros((nseq, v.shape[2], dkey, v.shape[3]), acc)
    operands = [
        *((normalized(a, acc) if normalize else a.astype(acc)) for a in (q, k)),
        v.astype(acc),
        jnp.ones(v.shape[:3], acc) if beta is None else strength(beta, beta_limit, acc),
        jnp.zeros((*v.shape[:3], 1), acc) if g is None else log_decay(g, A_log, dt_bias, lower_bound, acc),
        none if initial_state is None else initial_state.astype(acc),
    ]
    operands += [] if r is None else [r.astype(acc)]
    operands = [vary_like(a, *(other for other in operands if other is not a)) for a in operands]
    y, final = _careful((chunk, erase), tuple(operands), cu_seqlens)
    return (y * (dkey**-0.5 if scale is None else scale)).astype(v.dtype), final


@partial(jax.jit, static_argnames=_STATIC)
def delta_rule_step(
    q: Array, k: Array, v: Array, state: Array, *, g: Array | None = None, beta: Array | None = None,
    r: Array | None = None, A_log: Array | None = None, dt_bias: Array | None = None, scale: float | None = None,
    normalize: bool = False, lower_bound: float | None = None, beta_limit: float | None = None, erase: bool = True,
) -> tuple[Array, Array]:  # fmt: skip
    """Compute :func:`refold.ops.delta_rule_step` on JAX arrays: a true step, or a short run of them."""
    if v.ndim == 4:
        tokens = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "r": r}
        options = {"scale": scale, "normalize": normalize, "lower_bound": lower_bound, "beta_limit": beta_limit}
        step = partial(delta_rule_step, A_log=A_log, dt_bias=dt_bias, erase=erase, **options)
        return over_time(step, vary_like(state, *tokens.values(), A_log, dt_bias), tokens)

    acc, nheads, dkey = accumulator(v.dtype), v.shape[1], q.shape[2]
    q, k = (normalized(a, acc) if normalize else a.astype(acc) for a in (q, k))
    q, k = (jnp.repeat(a, nheads // a.shape[1], axis=1) for a in (q, k))  # (b, h, n)
    new = state.astype(acc)
    if g is not None:
        new = jnp.exp(log_decay(g[:, None], A_log, dt_bias, lower_bound, acc)[:, 0])[..., None] * new
    u = v.astype(acc)
    if erase:
        u = u - product("bhnp,bhn->bhp", new, k if r is None else r.astype(acc))
    if beta is not None:
        u = u * strength(beta, beta_limit, acc)[..., None]
    new = new + k[..., None] * u[:, :, None]
    y = product("bhnp,bhn->bhp", new, q) * (dkey**-0.5 if scale is None else scale)
    return y.astype(v.dtype), new.astype(state.dtype)


def normalized(z: Array, dtype: Any) -> Array:
    """Compute z / sqrt(Σz² + 1e-6) along the last axis."""
    z = z.astype(dtype)
    return z * jax.lax.rsqrt(jnp.sum(z * z, -1, keepdims=True) + 1e-6)


def strength(beta: Array, beta_limit: float | None, dtype: Any) -> Array:
    """Compute beta, or beta_limit * sigmoid(beta)."""
    beta = beta.astype(dtype)
    return beta if beta_limit is None else beta_limit * jax.nn.sigmoid(beta)


def log_decay(g: Array, A_log: Array | None, dt_bias: Array | None, lower_bound: float | None, dtype: Any) -> Array:
    """Compute the log decays, (b, t, h, 1 or n), from gates (b, t, h) or (b, t, h, n)."""
    g = g.astype(dtype).reshape(*g.shape[:3], -1)
    if dt_bias is not None:
        g = g + dt_bias.astype(dtype).reshape(g.shape[2], -1)
    rate = None if A_log is None else jnp.exp(A_log.astype(dtype))[:, None]
    if lower_bound is not None:
        return lower_bound * jax.nn.sigmoid(g if rate is None else rate * g)
    return g if rate is None else -rate * jax.nn.softplus(g)


def _spoiled(tokens: Line, bad: Bad, operands: tuple[Array, ...]) -> tuple[Array, ...]:
    spoiled = spoiled_gradients(tokens, bad)
    if bad.erase and bad.r is None:
        spoiled["k"] |= spoiled["r"]
    for name in ("q", "k"):  # a sum over the heads of a group
        b, t, _, n = spoiled[name].shape
        spoiled[name] = spoiled[name].reshape(b, t, operands[0].shape[2], -1, n).any(3)
    if operands[4].shape[-1] == 1:
        spoiled["g"] = spoiled["g"].any(-1, keepdims=True)
    names = ("q", "k", "v", "beta", "g", "initial_state", "r")
    return tuple(spoiled[name] for name in names[: len(operands)])


def _bad(static: Any, operands: tuple[Array, ...]) -> Bad:
    q, k, v, beta, _, initial, *r = (~jnp.isfinite(a) for a in operands)
    g = jnp.isnan(operands[4]) | (operands[4] == jnp.inf)
    return Bad(q, k, r[0] if r else None, v, beta, g, initial, static[1])


def _without(bad: Bad, operands: tuple[Array, ...]) -> tuple[Array, ...]:
    marks = bad.q, bad.k, bad.v, bad.beta, bad.g, bad.initial, bad.r
    return tuple(jnp.where(mark, 0, a) for mark, a in zip(marks, operands, strict=False))


def _core(static: Any, cu_seqlens: Array | None, *operands: Array) -> tuple[Array, Array]:
    """Compute y before the scale, and the final states, of finite operands."""
    chunk, erase = static
    q, k, v, beta, g, state, *r = operands
    batch, seqlen, nheads, headdim = v.shape
    ngroups = q.shape[2]
    tokens, pack = [q, k, v, beta, g, *r], None
    nchunks = -(-seqlen // chunk)
    if cu_seqlens is not None:
        pack = pack_chunks(cu_seqlens, seqlen, chunk)
        nchunks = pack.sequence.shape[0]
        filled = pack.filled.reshape(1, -1, 1)
        tokens = [jnp.where(filled if a.ndim == 3 else filled[..., None], a[:, pack.source], 0) for a in tokens]
    per_segment = min(nchunks, SEGMENT_CHUNKS) if is_known(nchunks) else SYMBOLIC_SEGMENT_CHUNKS
    nsegments = -(-nchunks // per_segment)

    def segments(a: Array) -> Array:
        """Cut (b, t, heads, ...) to (segments, c, b, g, r, l, ...)."""
        a = pad_time(a, nsegments * per_segment * chunk)
        a = a.reshape(batch, nsegments, per_segment, chunk, ngroups, a.shape[2] // ngroups, *a.shape[3:])
        return jnp.moveaxis(a, (1, 2, 0, 4, 5), (0, 1, 2, 3, 4))

    heads = (ngroups, nheads // ngroups)
    initial = state.reshape(-1, *heads, *state.shape[2:])  # (k, g, r, n, p)
    borders = None
    carry: Any = (initial, initial)
    if pack is not None:
        carry = (jnp.zeros_like(initial[:1]), initial)
        behind = nsegments * per_segment - nchunks  # chunks of no sequence that fill the last segment
        nothing = jnp.array([pack.nsequences, 0, 0])[:, None] * jnp.ones(behind, int)
        borders = jnp.concatenate([jnp.stack([pack.sequence, pack.first, pack.last]), nothing], 1)
        borders = borders.T.reshape(nsegments, per_segment, 3)
    body: Any = partial(_segment, erase, initial)
    inputs = (tuple(segments(a) for a in tokens), borders)
    if is_known(nsegments) and nsegments == 1:
        carry, y = body(carry, jax.tree.map(lambda a: a[0], inputs))
        y = y[None]
    else:
        carry = jax.tree.map(lambda a: vary_like(a, *operands, cu_seqlens), carry)
        carry, y = jax.lax.scan(jax.checkpoint(body), carry, inputs)
    # (segments, c, b, g, r, l, p) -> (b, t, h, p)
    y = jnp.moveaxis(y, (2, 0, 1, 5, 3, 4), (0, 1, 2, 3, 4, 5)).reshape(batch, -1, nheads, headdim)
    y = y[:, :seqlen] if pack is None else y[:, pack.target]
    final = carry[0] if pack is None else carry[1]
    return y, final.reshape(-1, nheads, *final.shape[3:])


_careful = careful(_core, _bad, _without, spoiled_results, _spoiled)


def _segment(erase: bool, initial: Array, carry: Any, inputs: Any) -> tuple[Any, Array]:
    """Run the chunks of one segment: the carry is the entering state and the final states of sequences."""
    (q, k, v, beta, g, *given), borders = inputs
    beta, read = beta[..., None], given[0] if given else k
    since = jnp.exp(jnp.cumsum(g, -2))  # what is left of the entering state
    until = jnp.exp(_sum_after(g))  # what of a token reaches the end of its chunk
    total = jnp.swapaxes(since[..., -1:, :], -1, -2)
    products = _per_head(g) if g.shape[-1] == 1 else _per_key(g)
    mixing = products(q, k) + _diagonal(jnp.sum(q * k, -1))
    solve = None
    if erase:
        solve = unit_lower_inverse(beta * products(read, k)) * jnp.swapaxes(beta, -1, -2)
    steps = (v if erase else v * beta, k * until, total, solve, read * since if erase else None, borders)

    def step(carry: Any, inputs: Any) -> tuple[Any, tuple[Array, Array]]:
        state, finals = carry
        values, writes, total, solve, reads, border = inputs
        if border is not None:
            sequence, first, last = border
            state = jnp.where(first > 0, initial[jnp.minimum(sequence, initial.shape[0] - 1)][None], state)
        entering, U = state, values
        if solve is not None:
            U = product("...ij,...jp->...ip", solve, values - product("...ln,...np->...lp", reads, state))
        state = total * state + product("...ln,...lp->...np", writes, U)
        if border is not None:
            finals = finals.at[jnp.where(last > 0, sequence, finals.shape[0])].set(state[0], mode="drop")
        return (state, finals), (entering, U)

    carry = jax.tree.map(lambda a: vary_like(a, *jax.tree.leaves((steps, initial))), carry)
    carry, (entering, U) = jax.lax.scan(step, carry, steps)
    y = product("...ln,...np->...lp", q * since, entering) + product("...ij,...jp->...ip", mixing, U)
    return carry, y


def _per_head(g: Array) -> Any:
    """Make the function Σ_d left_i k_j exp(c_i - c_j) for i > j, with one decay per head."""
    before = jnp.tril(jnp.ones((g.shape[-2],) * 2, bool), -1)
    # [i, j] sums the log decays after j up to i; no sum is a difference of larger ones.
    within = jnp.exp(jnp.cumsum(jnp.where(before, g, 0), -2))

    def products(left: Array, k: Array) -> Array:
        return jnp.where(before, product("...in,...jn->...ij", left, k), 0) * jnp.where(before, within, 0)

    return products


def _per_key(g: Array) -> Any:
    """Return the same with one decay per key, level by level: of blocks of rows and those just before them."""
    length, size, levels = g.shape[-2], 1, []
    while size < length:
        earlier, later = _pairs(g, size)
        levels.append((size, jnp.exp(jnp.cumsum(later, -2)), jnp.exp(_sum_after(earlier))))
        size *= 2

    def products(left: Array, k: Array) -> Array:
        shape = jnp.broadcast_shapes(left.shape[:-1], k.shape[:-1], g.shape[:-1])
        M = jnp.zeros((*shape, 1), g.dtype)[..., None]  # blocks of one row, (..., m, size, size)
        M = M.reshape(*shape[:-1], length, 1, 1)
        for size, since, until in levels:
            low = product("...in,...jn->...ij", _pairs(left, size)[1] * since, _pairs(k, size)[0] * until)
            M = _joined(M[..., 0::2, :, :], low, M[..., 1::2, :, :])
        return M[..., 0, :, :]

    return products


@jax.custom_jvp
def unit_lower_inverse(L: Array) -> Array:
    """Compute the inverse of I + L; L is zero where not i > j, (..., l, l), and l a power of two.

    From those of its diagonal blocks, level by level; as whole matrices, which suits matrix units.
    """
    length = L.shape[-1]
    row, column = jnp.arange(length)[:, None], jnp.arange(length)
    X, size = jnp.broadcast_to(jnp.eye(length, dtype=L.dtype), L.shape), 1
    while size < length:
        below = (row // size == column // size + 1) & (row // size % 2 == 1)
        X = X - product("...ij,...jk,...kl->...il", X, jnp.where(below, L, 0), X)
        size *= 2
    return X


@unit_lower_inverse.defjvp
def _unit_lower_inverse_jvp(primals: Any, tangents: Any) -> Any:
    X = unit_lower_inverse(*primals)
    return X, -product("...ij,...jk,...kl->...il", X, tangents[0], X)


def _pairs(rows: Array, size: int) -> tuple[Array, Array]:
    """Return the earlier and the later one of each two neighbouring blocks of rows, (..., m, size, n)."""
    blocks = rows.reshape(*rows.shape[:-2], -1, 2, size, rows.shape[-1])
    return blocks[..., 0, :, :], blocks[..., 1, :, :]


def _joined(first: Array, low: Array, second: Array) -> Array:
    """Put blocks together, (..., m, 2 size, 2 size), with zeros above the diagonal."""
    upper = jnp.concatenate([first, jnp.zeros_like(low)], -1)
    return jnp.concatenate([upper, jnp.concatenate([low, second], -1)], -2)


def _diagonal(values: Array) -> Array:
    return values[..., None] * jnp.eye(values.shape[-1], dtype=values.dtype)


def _sum_after(rows: Array) -> Array:
    """Sum all later rows, (..., l, n)."""
    shifted = jnp.concatenate([rows[..., 1:, :], jnp.zeros_like(rows[..., :1, :])], -2)
    return jnp.flip(jnp.cumsum(jnp.flip(shifted, -2), -2), -2)
