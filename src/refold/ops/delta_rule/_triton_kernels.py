"""The Triton kernels of the delta rule's forward pass and of its step, for any dtype, sizes, length and pack.

The time axis is cut into chunks of CHUNK tokens, which never cross the end of a sequence. With c the sum of log decays
inside a chunk, K and Q the keys and queries, S the state before the chunk (keys x values) and i, j tokens,

    T = (I + diag(beta) strict(K Kᵀ) ∘ e^(c_i - c_j))⁻¹ diag(beta)        P = tril(Q Kᵀ) ∘ e^(c_i - c_j)
    U = T (V - e^c K S)        Y = e^c Q S + P U        S' = e^c_last S + (e^(c_last - c) K)ᵀ U

`gates` sums decays. `prepare` (one program per chunk and head) writes T, P and the factors of rows, with which queries
and keys are also normalised: no copy of them is made. `chain` (one program per sequence, head and tile of values) goes
over the chunks with the transposed state in registers: each product's result is the left factor of the next one.

A decay per key cannot leave T. `decay` then writes c, and `prepare_keyed` writes T, P, and keys and queries times their
decays. No exponent is positive, for any gate: neighbouring blocks of 1, 2, 4, ... tokens have a reference between them.

Few long sequences do not fill a GPU. They are cut into segments: `chain` computes each segment's state from zero, and
the image of the identity (the map that the segment applies to the state before it); `pass` joins them.

A slot is the place of a chunk in the workspace. In a pack, sequence n begins at slot cu_seqlens[n] // CHUNK + n.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from refold.ops.torch import launch
from refold.ops.triton.math import LOG2E, dot, exp2, is_finite, sequence, sigmoid, softplus
from refold.ops.triton.slots import place, place_of_token, spread

FLOOR = tl.constexpr(-110.0)  # e^-110 is zero in float32: a log decay below it, -inf too, is the same as this
NORM_EPS = tl.constexpr(1e-6)
NEAR = tl.constexpr(60.0)  # 2^60 times a key, and the squares of such, are in the range of bfloat16
BF16 = tl.constexpr("widen" if launch.INTERPRETED else "ieee")


@triton.jit
def share(v):
    """Compute 1 / (1 + exp(-v)); below -80 it is zero beside anything that it is added to, and of -inf exactly zero."""
    return tl.where(v == float("-inf"), 0.0, sigmoid(tl.where(v < -80.0, -80.0, v)))


@triton.jit
def log_decay(g, A, bias, lower, GATE: tl.constexpr):
    """Return the log decay of a raw gate: GATE is "log", "softplus", "bounded" or "bounded_A"."""
    g = g.to(tl.float32) + bias
    if GATE == "softplus":
        g = -tl.exp(A) * softplus(g)
    elif GATE == "bounded":
        g = lower * share(g)
    elif GATE == "bounded_A":
        g = lower * share(tl.exp(A) * g)
    return tl.where(g < FLOOR, FLOOR, g)


@triton.jit
def gate_bias(bias_ptr, pid_h, offs_n, mask_n, stride_bias_h, stride_bias_n):
    """Return the biases of the gates of a head, by key; zeros where there are none."""
    bias = offs_n * 0.0
    if bias_ptr is not None:
        bias_at = bias_ptr + pid_h * stride_bias_h + offs_n * stride_bias_n
        bias = tl.load(bias_at, mask=mask_n, other=0.0).to(tl.float32)
    return bias


@triton.jit
def load_gates(rows, A_ptr, bias_ptr, pid_h, inside, offs_n, mask_n, stride_n, stride_bias_h, stride_bias_n):
    """Return the gates of a head, (tokens, keys), the log of its rate, and biases, (1, keys)."""
    A = 0.0
    if A_ptr is not None:
        A = tl.load(A_ptr + pid_h).to(tl.float32)
    bias = gate_bias(bias_ptr, pid_h, offs_n, mask_n, stride_bias_h, stride_bias_n)
    mask = inside[:, None] & mask_n[None, :]
    g = tl.load(rows[:, None] + offs_n[None, :] * stride_n, mask=mask, other=0.0)
    return g.to(tl.float32), A, bias[None, :]


@triton.jit
def span(cu_seqlens_ptr, seq, seqlen, nchunks, CHUNK: tl.constexpr, VARLEN: tl.constexpr):
    """Return row of the batch, first token, number of tokens and first slot of a sequence."""
    if VARLEN:
        begin, end = sequence(cu_seqlens_ptr, seq, True, seqlen)
        return seq * 0, begin, end - begin, begin // CHUNK + seq
    return seq, seq * 0, seqlen, seq * nchunks


@triton.jit
def slot_span(cu_seqlens_ptr, slot, seqlen, nchunks, nseqs, CHUNK: tl.constexpr, VARLEN: tl.constexpr):
    """Return row of the batch, first token and number of tokens of a slot, which may be none."""
    row, start, length = slot * 0, slot * 0, slot * 0
    if VARLEN:
        low, high = slot * 0, slot * 0 + nseqs
        while high - low > 1:
            middle = (low + high) // 2
            begin, _ = sequence(cu_seqlens_ptr, middle, True, seqlen)
            after = begin // CHUNK + middle > slot
            low = tl.where(after, low, middle)
            high = tl.where(after, middle, high)
        begin, end = sequence(cu_seqlens_ptr, low, True, seqlen)
        at = begin + (slot - begin // CHUNK - low) * CHUNK
        inside = (at >= begin) & (at < end)
        start = tl.where(inside, at, 0)
        length = tl.where(inside, tl.minimum(CHUNK, end - at), 0)
    else:
        row = slot // nchunks
        start = slot % nchunks * CHUNK
        length = tl.minimum(CHUNK, seqlen - start)
    return row, start, length


@triton.jit
def _product(a, b, PRECISION: tl.constexpr):
    if PRECISION == "half":
        return tl.dot(a.to(tl.float16), b.to(tl.float16))
    elif PRECISION == "halves":
        a0, b0 = a.to(tl.float16), b.to(tl.float16)
        a1, b1 = (a - a0.to(tl.float32)).to(tl.float16), (b - b0.to(tl.float32)).to(tl.float16)
        return tl.dot(a0, b0, tl.dot(a0, b1, tl.dot(a1, b0)))
    elif PRECISION == "wide":
        return dot(a.to(tl.bfloat16), b.to(tl.bfloat16), None, BF16)
    else:
        return dot(a, b, None, PRECISION)


@triton.jit
def _levels(L, CHUNK: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    offs = tl.arange(0, CHUNK)
    X = tl.where(offs[:, None] == offs[None, :], 1.0, 0.0) - tl.where(offs[:, None] == (offs ^ 1)[None, :], L, 0.0)
    for level in tl.range(1, LEVELS, loop_unroll_factor=1):
        joins = (offs >> level)[:, None] == ((offs >> level) ^ 1)[None, :]  # the halves of a block of twice the size
        X -= _product(X, _product(tl.where(joins, L, 0.0), X, PRECISION), PRECISION)
    return X


@triton.jit
def _inverse(L, CHUNK: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """Return (I + L)⁻¹ for a strictly lower L.

    From the inverse X of the diagonal blocks, X - X L' X is that of blocks twice as large, with L' what joins two of
    them. No powers of L: they would be large where the inverse is not.

    With keys of length one and strengths up to 2, no element is above 2, and the 11 bits of float16 ("half") hold them
    as well as TF32, and better than bfloat16 holds the result. Beside a result in float16 those roundings would be as
    large as its own, level by level: each factor then is a sum of two ("halves"). With other keys they may be too large
    for float16, and bfloat16 is used.
    """
    X = _levels(L, CHUNK, LEVELS, PRECISION)
    if PRECISION == "half" or PRECISION == "halves":  # noqa: SIM102 (constants, then a value)
        if tl.max(tl.where(tl.abs(X) < 256.0, 0, 1)) > 0:
            X = _levels(L, CHUNK, LEVELS, "wide")
    return X


@triton.jit
def _clean(tile):
    """Return a tile with zeros for what is not finite, and 0 for each of its rows, NaN where there was such a value."""
    finite = is_finite(tile)
    mark = tl.max(tl.where(finite, 0.0, 1.0), axis=1)
    return tl.where(finite, tile, 0.0).to(tile.dtype), tl.where(mark > 0.0, float("nan"), 0.0)


@triton.jit
def _next(mark, inside):
    """Move marks of tokens to the next token: a key that is written, not read, spoils what is read there."""
    offs_t = tl.arange(0, mark.shape[0])
    moved = tl.sum(tl.where(offs_t[:, None] == offs_t[None, :] + 1, mark[None, :], 0.0), axis=1)
    return tl.where(inside, moved, 0.0)


@triton.jit
def row_norm(tile, NORMALIZE: tl.constexpr):
    """Return the factor of each row that normalises it."""
    if NORMALIZE:
        wide = tile.to(tl.float32)
        return 1.0 / tl.sqrt(tl.sum(wide * wide, axis=1) + NORM_EPS)
    else:
        return tl.full((tile.shape[0],), 1.0, tl.float32)


@triton.jit
def diagonal(square):
    """Return the diagonal of a square."""
    offs = tl.arange(0, square.shape[0])
    return tl.sum(tl.where(offs[:, None] == offs[None, :], square, 0.0), axis=1)


@triton.jit
def _load_beta(beta_ptr, at, inside, beta_limit, BETA: tl.constexpr):
    """Return beta, zero outside and where it is not finite, and 0 or NaN, likewise."""
    beta = tl.where(inside, 1.0, 0.0)
    if BETA != "one":
        beta = tl.load(beta_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if BETA == "sigmoid":
            beta = tl.where(inside, beta_limit * share(beta), 0.0)
    finite = is_finite(beta)
    return tl.where(finite, beta, 0.0), tl.where(finite, 0.0, float("nan"))


@triton.jit
def _delta_gates_kernel(
    g_ptr, beta_ptr, A_ptr, bias_ptr, cu_seqlens_ptr, rows_ptr, more_ptr, flags_ptr,
    seqlen, nchunks, nseqs, nheads, lower, beta_limit,
    stride_g_b, stride_g_t, stride_g_h, stride_beta_b, stride_beta_t, stride_beta_h,
    CHUNK: tl.constexpr, BLOCK_H: tl.constexpr, GATE: tl.constexpr, BETA: tl.constexpr, VARLEN: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (slots, blocks of heads): a program computes strengths and sums of log decays of a chunk.

    Of the rows in ``more`` it writes strengths, NaN where they are not finite, and the sums: float64 in two float32
    parts, since differences of float32 sums lose small decays after large ones. The first of ``rows`` is 0, NaN where a
    decay is not finite. A flag says whether the inverse may be large even for keys of length one: for strengths outside
    of [0, 2], and decays above 1. After the flags of a pack come first token and number of tokens of its slots. EARLY:
    the next kernel may start, and waits for this one.
    """
    if EARLY:
        gdc_launch_dependents()
    slot = tl.program_id(0)
    batch, start, length = slot_span(cu_seqlens_ptr, slot, seqlen, nchunks, nseqs, CHUNK, VARLEN)
    if VARLEN:
        spans = flags_ptr + (tl.num_programs(0) * nheads + 2 * slot)
        tl.store(spans, start)
        tl.store(spans + 1, length)
    batch, start = batch.to(tl.int64), start.to(tl.int64)
    offs_t = tl.arange(0, CHUNK)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = offs_h < nheads
    mask = (offs_t < length)[:, None] & mask_h[None, :]
    at = batch * stride_beta_b + (start + offs_t[:, None]) * stride_beta_t + offs_h[None, :] * stride_beta_h
    beta, mark = _load_beta(beta_ptr, at, mask, beta_limit, BETA)
    flag = tl.max(tl.where((beta >= 0.0) & (beta <= 2.0), 0, 1), axis=0)
    strength = beta + mark
    g = tl.zeros((CHUNK, BLOCK_H), tl.float32)
    mark = g
    if g_ptr is not None:
        A = offs_h * 0.0
        bias = offs_h * 0.0
        if A_ptr is not None:
            A = tl.load(A_ptr + offs_h, mask=mask_h, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + offs_h, mask=mask_h, other=0.0).to(tl.float32)
        g_rows = g_ptr + batch * stride_g_b + (start + offs_t[:, None]) * stride_g_t
        g = tl.load(g_rows + offs_h[None, :] * stride_g_h, mask=mask, other=0.0)
        g = tl.where(mask, log_decay(g, A[None, :], bias[None, :], lower, GATE), 0.0)
        finite = is_finite(g)
        mark = tl.where(finite, 0.0, float("nan"))
        g = tl.where(finite, g, 0.0)
        flag = tl.maximum(flag, tl.max(tl.where(g > 0.0, 1, 0), axis=0))
    c = tl.cumsum(g.to(tl.float64) * LOG2E, axis=0)
    high = c.to(tl.float32)
    cell = slot.to(tl.int64) * nheads + offs_h
    more = more_ptr + cell[None, :] * (5 * CHUNK) + offs_t[:, None]
    tl.store(more, strength, mask=mask_h[None, :])
    tl.store(more + 3 * CHUNK, high, mask=mask_h[None, :])
    tl.store(more + 4 * CHUNK, (c - high).to(tl.float32), mask=mask_h[None, :])
    tl.store(rows_ptr + cell[None, :] * (4 * CHUNK) + offs_t[:, None], mark, mask=mask_h[None, :])
    tl.store(flags_ptr + cell, flag, mask=mask_h)


@triton.jit
def _delta_prepare_kernel(
    q_ptr, k_ptr, r_ptr, cu_seqlens_ptr, T_ptr, P_ptr, rows_ptr, X_ptr, more_ptr,
    seqlen, nchunks, nseqs, nheads, ngroups, nkeys, scale,
    stride_q_b, stride_q_t, stride_q_g, stride_k_b, stride_k_t, stride_k_g, stride_r_b, stride_r_t, stride_r_h,
    CHUNK: tl.constexpr, LEVELS: tl.constexpr, BLOCK_N: tl.constexpr, NORMALIZE: tl.constexpr, ERASE: tl.constexpr,
    VARLEN: tl.constexpr, PRECISION: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """Grid (slots, heads): a program reads keys and queries of a chunk, and writes T, P and rows of factors.

    Rows: of what is read from the state (NaN where key, gate or beta is not finite), of queries, of what is written,
    and the decay of the whole chunk. Of ``more`` it writes what queries and keys are multiplied by.
    """
    slot = tl.program_id(0)
    pid_h = tl.program_id(1)
    pid_g = pid_h // (nheads // ngroups)
    batch, start, length = slot_span(cu_seqlens_ptr, slot, seqlen, nchunks, nseqs, CHUNK, VARLEN)
    batch, start = batch.to(tl.int64), start.to(tl.int64)
    offs_t = tl.arange(0, CHUNK)
    offs_n = tl.arange(0, BLOCK_N)
    inside = offs_t < length
    mask = inside[:, None] & (offs_n < nkeys)[None, :]
    q_rows = q_ptr + batch * stride_q_b + start * stride_q_t + pid_g.to(tl.int64) * stride_q_g
    k_rows = k_ptr + batch * stride_k_b + start * stride_k_t + pid_g.to(tl.int64) * stride_k_g
    k = tl.load(k_rows + offs_t[:, None] * stride_k_t + offs_n[None, :], mask=mask, other=0.0)
    q = tl.load(q_rows + offs_t[:, None] * stride_q_t + offs_n[None, :], mask=mask, other=0.0)
    row = slot.to(tl.int64) * nheads + pid_h
    more = more_ptr + row * (5 * CHUNK) + offs_t
    rows = rows_ptr + row * (4 * CHUNK) + offs_t
    beta = tl.load(more)
    mark = tl.load(rows) + beta * 0.0
    beta = tl.where(is_finite(beta), beta, 0.0)
    high = tl.load(more + 3 * CHUNK)
    low = tl.load(more + 4 * CHUNK)
    last = more_ptr + row * (5 * CHUNK) + 4 * CHUNK - 1
    total = tl.load(last)
    TWO: tl.constexpr = T_ptr.dtype.element_ty == tl.float32
    r = k
    if r_ptr is not None:
        r_rows = r_ptr + batch * stride_r_b + start * stride_r_t + pid_h.to(tl.int64) * stride_r_h
        r, bad = _clean(tl.load(r_rows + offs_t[:, None] * stride_r_t + offs_n[None, :], mask=mask, other=0.0))
        mark += bad
    causal = offs_t[:, None] >= offs_t[None, :]
    between = high[:, None] - high[None, :]
    if TWO:
        between += low[:, None] - low[None, :]
    grown = exp2(tl.where(causal, between, 0.0))
    keys = tl.trans(k)
    square = row * (CHUNK * CHUNK) + offs_t[:, None] * CHUNK + offs_t[None, :]
    # Of products of rows, the diagonal has their lengths, and is not finite where a row is not.
    k_factor = tl.full((CHUNK,), 1.0, tl.float32)
    q_factor = tl.full((CHUNK,), scale, tl.float32)
    T = tl.where(offs_t[:, None] == offs_t[None, :], 1.0, 0.0)
    L = dot(k, keys, None, PRECISION)
    if ERASE:  # else what is not finite in a key stays in its row of the state
        if r_ptr is not None:
            mark += _next(diagonal(L) * 0.0, inside)
        else:
            mark += diagonal(L) * 0.0
    if NORMALIZE:
        k_factor = 1.0 / tl.sqrt(diagonal(L) + NORM_EPS)
        q_factor *= 1.0 / tl.sqrt(diagonal(dot(q, tl.trans(q), None, PRECISION)) + NORM_EPS)
    r_factor = k_factor
    if r_ptr is not None:
        r_factor = tl.full((CHUNK,), 1.0, tl.float32)
        L = dot(r, keys, None, PRECISION)
    P = dot(q, keys, None, PRECISION) * q_factor[:, None] * (grown * k_factor[None, :])
    tl.store(P_ptr + square, tl.where(causal, P, 0.0).to(P_ptr.dtype.element_ty))
    if ERASE:
        L *= (r_factor * beta)[:, None] * (grown * k_factor[None, :])
        # Where keys are not finite, all is NaN from there on: `mark` says so.
        L = tl.where((offs_t[:, None] > offs_t[None, :]) & (tl.abs(L) < float("inf")), L, 0.0)
        T = _inverse(L, CHUNK, LEVELS, INVERSE)
    if X_ptr is not None:
        tl.store(X_ptr + square, T.to(X_ptr.dtype.element_ty))
    T *= beta[None, :]
    tl.store(T_ptr + square, T.to(T_ptr.dtype.element_ty))
    from_start = exp2(high)
    tl.store(rows, from_start * r_factor + mark)
    tl.store(rows + CHUNK, from_start * q_factor)
    tl.store(rows + 2 * CHUNK, exp2((total - high) + (tl.load(last + CHUNK) - low)) * k_factor)
    tl.store(rows + 3 * CHUNK, offs_t * 0.0 + exp2(total))
    tl.store(more + CHUNK, q_factor)
    tl.store(more + 2 * CHUNK, k_factor)


@triton.jit
def _delta_decay_kernel(
    g_ptr, A_ptr, bias_ptr, cu_seqlens_ptr, c_ptr, rows_ptr, seqlen, nchunks, nseqs, nheads, nkeys, lower,
    stride_g_b, stride_g_t, stride_g_h, stride_g_n, stride_bias_h, stride_bias_n,
    CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, GATE: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """Grid (slots, heads): a program sums the log2 decays of a chunk, each key for itself, in float64.

    Writes the sums in their given dtype, and 0 for each token, NaN where a decay is not finite.
    """
    slot = tl.program_id(0)
    pid_h = tl.program_id(1)
    batch, start, length = slot_span(cu_seqlens_ptr, slot, seqlen, nchunks, nseqs, CHUNK, VARLEN)
    batch, start = batch.to(tl.int64), start.to(tl.int64)
    offs_t = tl.arange(0, CHUNK)
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = offs_n < nkeys
    mask = (offs_t < length)[:, None] & mask_n[None, :]
    rows = g_ptr + batch * stride_g_b + (start + offs_t) * stride_g_t + pid_h * stride_g_h
    g, A, bias = load_gates(rows, A_ptr, bias_ptr, pid_h, offs_t < length, offs_n, mask_n, stride_g_n, stride_bias_h,
                            stride_bias_n)  # fmt: skip
    g, mark = _clean(tl.where(mask, log_decay(g, A, bias, lower, GATE), 0.0))
    c = tl.cumsum(g.to(tl.float64) * LOG2E, axis=0)
    row = slot.to(tl.int64) * nheads + pid_h
    at = (row * CHUNK + offs_t[:, None]) * nkeys + offs_n[None, :]
    tl.store(c_ptr + at, c.to(c_ptr.dtype.element_ty), mask=mask_n[None, :])
    tl.store(rows_ptr + row * (4 * CHUNK) + offs_t, mark)


@triton.jit
def _delta_prepare_keyed_kernel(
    q_ptr, k_ptr, r_ptr, c_ptr, beta_ptr, cu_seqlens_ptr, T_ptr, P_ptr, rows_ptr, Q_ptr, R_ptr, K_ptr, decay_ptr,
    X_ptr, more_ptr,
    seqlen, nchunks, nseqs, nheads, ngroups, nkeys, scale, beta_limit,
    stride_q_b, stride_q_t, stride_q_g, stride_k_b, stride_k_t, stride_k_g, stride_r_b, stride_r_t, stride_r_h,
    stride_beta_b, stride_beta_t, stride_beta_h,
    CHUNK: tl.constexpr, LEVELS: tl.constexpr, BLOCK_N: tl.constexpr, BETA: tl.constexpr, NORMALIZE: tl.constexpr,
    ERASE: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """Grid (slots, heads): as `_delta_prepare_kernel`, for a decay per key, summed in ``c``.

    Writes also queries and read keys times e^c, keys times e^(c_last - c), and e^c_last.
    """
    slot = tl.program_id(0)
    pid_h = tl.program_id(1)
    pid_g = pid_h // (nheads // ngroups)
    batch, start, length = slot_span(cu_seqlens_ptr, slot, seqlen, nchunks, nseqs, CHUNK, VARLEN)
    batch, start = batch.to(tl.int64), start.to(tl.int64)
    offs_t = tl.arange(0, CHUNK)
    offs_n = tl.arange(0, BLOCK_N)
    inside = offs_t < length
    mask_n = offs_n < nkeys
    mask = inside[:, None] & mask_n[None, :]
    dtype: tl.constexpr = Q_ptr.dtype.element_ty
    row = slot.to(tl.int64) * nheads + pid_h
    q_rows = q_ptr + batch * stride_q_b + start * stride_q_t + pid_g.to(tl.int64) * stride_q_g + offs_n[None, :]
    k_rows = k_ptr + batch * stride_k_b + start * stride_k_t + pid_g.to(tl.int64) * stride_k_g + offs_n[None, :]
    c_rows = c_ptr + row * CHUNK * nkeys + offs_n[None, :]
    k = tl.load(k_rows + offs_t[:, None] * stride_k_t, mask=mask, other=0.0)
    own = tl.zeros((CHUNK,), tl.float32)
    if ERASE:  # else what is not finite in a key stays in its row of the state
        k, own = _clean(k)
    q = tl.load(q_rows + offs_t[:, None] * stride_q_t, mask=mask, other=0.0)
    at = batch * stride_beta_b + (start + offs_t) * stride_beta_t + pid_h * stride_beta_h
    beta, bad = _load_beta(beta_ptr, at, inside, beta_limit, BETA)
    strength = beta + bad
    k_factor = row_norm(k, NORMALIZE)
    q_factor = row_norm(q, NORMALIZE) * scale
    k_wide = k.to(tl.float32) * k_factor[:, None]
    q_wide = q.to(tl.float32) * q_factor[:, None]
    r_wide = k_wide
    mark = bad + tl.load(rows_ptr + row * (4 * CHUNK) + offs_t)
    if r_ptr is None:
        mark += own
    else:
        mark += _next(own, inside)
        r_rows = r_ptr + batch * stride_r_b + start * stride_r_t + pid_h.to(tl.int64) * stride_r_h
        r, bad = _clean(tl.load(r_rows + offs_t[:, None] * stride_r_t + offs_n[None, :], mask=mask, other=0.0))
        r_wide = r.to(tl.float32)
        mark += bad
    c = tl.load(c_rows + offs_t[:, None] * nkeys, mask=mask_n[None, :], other=0.0)
    total = tl.load(c_ptr + (row * CHUNK + CHUNK - 1) * nkeys + offs_n, mask=mask_n, other=0.0)
    from_start = exp2(c.to(tl.float32))
    at = (row * CHUNK + offs_t[:, None]) * nkeys + offs_n[None, :]
    tl.store(Q_ptr + at, (q_wide * from_start).to(dtype), mask=mask_n[None, :])
    if ERASE:
        tl.store(R_ptr + at, (r_wide * from_start).to(dtype), mask=mask_n[None, :])
    to_end = exp2((total[None, :] - c).to(tl.float32))
    written = k_wide + own[:, None]
    if r_ptr is not None:
        k = tl.load(k_rows + offs_t[:, None] * stride_k_t, mask=mask, other=0.0)
        written = k.to(tl.float32) * k_factor[:, None]
    tl.store(K_ptr + at, (written * to_end).to(dtype), mask=mask_n[None, :])
    tl.store(decay_ptr + row * nkeys + offs_n, exp2(total.to(tl.float32)), mask=mask_n)

    # Of each pair of blocks of `size` tokens, the later one's first token is the reference: no exponent is positive.
    P = tl.where(offs_t[:, None] == offs_t[None, :], (tl.sum(q_wide * k_wide, axis=1) + own)[:, None], 0.0)
    L = tl.zeros((CHUNK, CHUNK), tl.float32)
    first = slot * 0
    if dtype == tl.bfloat16:
        # Where 8 tokens decay little enough for the range of bfloat16, 16 tokens have one reference, in their middle.
        block = offs_t >> 4
        reference = (block << 4) + 8
        between = c - tl.load(c_rows + reference[:, None] * nkeys, mask=mask_n[None, :], other=0.0)
        if tl.max(tl.max(tl.abs(between), axis=1), axis=0) < NEAR:
            keys = tl.trans((k_wide * exp2(-between)).to(dtype))
            grown = exp2(between)
            pairs = (offs_t[:, None] > offs_t[None, :]) & (block[:, None] == block[None, :])
            P += tl.where(pairs, dot((q_wide * grown).to(dtype), keys, None, PRECISION), 0.0)
            if ERASE:
                L += tl.where(pairs, dot((r_wide * grown).to(dtype), keys, None, PRECISION), 0.0)
            first += 4
    for level in range(first, LEVELS):
        block = offs_t >> level
        later = block % 2 == 1
        reference = ((block >> 1) * 2 + 1) << level
        between = c - tl.load(c_rows + reference[:, None] * nkeys, mask=mask_n[None, :], other=0.0)
        shrunk = exp2(tl.where(later[:, None], between, -between).to(tl.float32))
        k_shrunk = (k_wide * shrunk).to(dtype)
        keys = tl.trans(k_shrunk)
        pairs = later[:, None] & (block[:, None] == block[None, :] + 1)
        P += tl.where(pairs, dot((q_wide * shrunk).to(dtype), keys, None, PRECISION), 0.0)
        if ERASE:
            if r_ptr is not None:
                L += tl.where(pairs, dot((r_wide * shrunk).to(dtype), keys, None, PRECISION), 0.0)
            else:
                L += tl.where(pairs, dot(k_shrunk, keys, None, PRECISION), 0.0)
    T = tl.where(offs_t[:, None] == offs_t[None, :], 1.0, 0.0)
    if ERASE:
        T = _inverse(L * beta[:, None], CHUNK, LEVELS, INVERSE)
    square = row * (CHUNK * CHUNK) + offs_t[:, None] * CHUNK + offs_t[None, :]
    if X_ptr is not None:
        tl.store(X_ptr + square, T.to(X_ptr.dtype.element_ty))
    T *= beta[None, :]
    tl.store(T_ptr + square, T.to(T_ptr.dtype.element_ty))
    tl.store(P_ptr + square, P.to(P_ptr.dtype.element_ty))
    rows = rows_ptr + row * (4 * CHUNK) + offs_t
    tl.store(rows, 1.0 + mark)
    tl.store(rows + CHUNK, offs_t * 0.0 + 1.0)
    tl.store(rows + 2 * CHUNK, offs_t * 0.0 + 1.0)
    if more_ptr is not None:
        more = more_ptr + row * (5 * CHUNK) + offs_t
        tl.store(more, strength)
        tl.store(more + CHUNK, q_factor)
        tl.store(more + 2 * CHUNK, k_factor)


@triton.jit
def _delta_chain_kernel(
    q_ptr, r_ptr, k_ptr, v_ptr, T_ptr, P_ptr, rows_ptr, decay_ptr, initial_ptr, before_ptr, cu_seqlens_ptr,
    y_ptr, final_ptr, after_ptr, states_ptr, u_ptr,
    seqlen, nchunks, nsegments, nheads, ngroups, nkeys, nvalues,
    stride_q_b, stride_q_t, stride_q_g, stride_r_b, stride_r_t, stride_r_h, stride_k_b, stride_k_t, stride_k_g,
    stride_v_b, stride_v_t, stride_v_h, stride_i_s, stride_i_h, stride_i_n, stride_i_p,
    CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, KEYED: tl.constexpr, ERASE: tl.constexpr,
    OUTPUT: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (heads x tiles, segments, sequences): a program owns one tile of values of one head, in one segment.

    Keeps the transposed state (values, keys) in float32 registers, and reads keys, queries, values, T and P of each
    chunk once. OUTPUT: begins with the state before its segment and writes y. Otherwise it begins with zero and writes
    the state after its segment; more tiles begin with rows of the identity, without values, and write the map.
    """
    blocks_p = tl.cdiv(nvalues, BLOCK_P)
    tiles = blocks_p
    if not OUTPUT:
        tiles += tl.cdiv(nkeys, BLOCK_P)
    pid_h = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    pid_s = tl.program_id(1)
    seq = tl.program_id(2)
    pid_g = (pid_h // (nheads // ngroups)).to(tl.int64)
    batch, begin, tokens, first_slot = span(cu_seqlens_ptr, seq, seqlen, nchunks, CHUNK, VARLEN)
    batch, begin = batch.to(tl.int64), begin.to(tl.int64)
    count = tl.cdiv(tokens, CHUNK)
    piece = tl.cdiv(count, nsegments)
    offs_t = tl.arange(0, CHUNK)
    offs_n = tl.arange(0, BLOCK_N)
    maps = tile >= blocks_p
    offs_p = tl.where(maps, tile - blocks_p, tile) * BLOCK_P + tl.arange(0, BLOCK_P)
    mask_n = offs_n < nkeys
    mask_p = (offs_p < nvalues) & (offs_p * 0 + tile < blocks_p)
    mask_pn = mask_p[:, None] & mask_n[None, :]
    head = seq.to(tl.int64) * nheads + pid_h
    size = nkeys * nvalues
    width = nvalues + nkeys
    state = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    if OUTPUT:
        if before_ptr is not None:
            start_rows = before_ptr + ((head * nsegments + pid_s) * nvalues + offs_p[:, None]) * nkeys
            state = tl.load(start_rows + offs_n[None, :], mask=mask_pn, other=0.0)
        elif initial_ptr is not None:
            start_rows = initial_ptr + seq.to(tl.int64) * stride_i_s + pid_h.to(tl.int64) * stride_i_h
            at = offs_p[:, None].to(tl.int64) * stride_i_p + offs_n[None, :] * stride_i_n
            state = tl.load(start_rows + at, mask=mask_pn, other=0.0).to(tl.float32)
    else:
        same = (offs_p[:, None] == offs_n[None, :]) & (offs_p[:, None] * 0 + tile >= blocks_p)
        state = tl.where(same, 1.0, 0.0)
    v_base = v_ptr + batch * stride_v_b + begin * stride_v_t + pid_h.to(tl.int64) * stride_v_h
    y_first = ((batch * seqlen + begin) * nheads + pid_h) * nvalues
    q_base = q_ptr + batch * stride_q_b + begin * stride_q_t + pid_g * stride_q_g
    k_base = k_ptr + batch * stride_k_b + begin * stride_k_t + pid_g * stride_k_g
    r_base = k_base
    if r_ptr is not None:
        r_base = r_ptr + batch * stride_r_b + begin * stride_r_t + pid_h.to(tl.int64) * stride_r_h
    first = pid_s * piece
    for chunk in tl.range(first, tl.minimum(first + piece, count), num_stages=STAGES):
        start = begin * 0 + chunk * CHUNK
        inside = offs_t < tokens - chunk * CHUNK
        row = (first_slot.to(tl.int64) + chunk) * nheads + pid_h
        square = row * (CHUNK * CHUNK) + offs_t[:, None] * CHUNK + offs_t[None, :]
        mask_tn = inside[:, None] & mask_n[None, :]
        if KEYED:
            tile_at = (row * CHUNK + offs_t[:, None]) * nkeys + offs_n[None, :]
            k = tl.load(k_ptr + tile_at, mask=mask_n[None, :], other=0.0)
            r = tl.load(r_ptr + tile_at, mask=mask_n[None, :], other=0.0)
        else:
            k = tl.load(k_base + start * stride_k_t + offs_t[:, None] * stride_k_t + offs_n[None, :],
                        mask=mask_tn, other=0.0)  # fmt: skip
            r = k
            if r_ptr is not None:
                r = tl.load(r_base + start * stride_r_t + offs_t[:, None] * stride_r_t + offs_n[None, :],
                            mask=mask_tn, other=0.0)  # fmt: skip
        v_at = start * stride_v_t + offs_t[None, :] * stride_v_t + offs_p[:, None]
        v = tl.load(v_base + v_at, mask=mask_p[:, None] & inside[None, :], other=0.0)
        T = tl.load(T_ptr + square)
        rows = rows_ptr + row * (4 * CHUNK) + offs_t
        read = tl.load(rows)
        write = tl.load(rows + 2 * CHUNK)
        narrow = state.to(k.dtype)
        if ERASE:
            x = v.to(tl.float32) - dot(narrow, tl.trans(r), None, PRECISION) * read[None, :]
        else:
            x = v.to(tl.float32) + read[None, :] * 0.0
        # In a product, what is not finite would reach the tokens before it as well: zero times it is NaN.
        finite = tl.abs(x) < float("inf")
        bad = tl.min(tl.where(finite, CHUNK, offs_t[None, :]), axis=1)  # first token that is not, a channel
        u = dot(tl.where(finite, x, 0.0).to(k.dtype), tl.trans(T), None, PRECISION)
        if OUTPUT and states_ptr is not None:
            state_at = (row * nvalues + offs_p[:, None]) * nkeys + offs_n[None, :]
            tl.store(states_ptr + state_at, narrow, mask=mask_pn)
            u_at = (row * CHUNK + offs_t[None, :]) * nvalues + offs_p[:, None]
            kept = tl.where(offs_t[None, :] >= bad[:, None], float("nan"), u)
            tl.store(u_ptr + u_at, kept.to(u_ptr.dtype.element_ty), mask=mask_p[:, None])
        elif OUTPUT:
            if KEYED:
                q = tl.load(q_ptr + tile_at, mask=mask_n[None, :], other=0.0)
            else:
                q = tl.load(q_base + start * stride_q_t + offs_t[:, None] * stride_q_t + offs_n[None, :],
                            mask=mask_tn, other=0.0)  # fmt: skip
            P = tl.load(P_ptr + square)
            query = tl.load(rows + CHUNK)
            y = dot(narrow, tl.trans(q), None, PRECISION) * query[None, :]
            y = dot(u.to(k.dtype), tl.trans(P), y, PRECISION)
            y = tl.where(offs_t[None, :] >= bad[:, None], float("nan"), y)
            y_at = start * (nheads * nvalues) + offs_t[None, :].to(tl.int64) * (nheads * nvalues) + offs_p[:, None]
            tl.store(y_ptr + y_first + y_at, y.to(y_ptr.dtype.element_ty), mask=mask_p[:, None] & inside[None, :])
        spoilt = tl.where(bad < CHUNK, float("nan"), 1.0)
        if KEYED:
            decay = tl.load(decay_ptr + row * nkeys + offs_n, mask=mask_n, other=0.0)
            state *= spoilt[:, None] * decay[None, :]
        else:
            state *= (spoilt * tl.load(rows_ptr + row * (4 * CHUNK) + 3 * CHUNK))[:, None]
        state = dot((u * write[None, :]).to(k.dtype), k, state, PRECISION)
    if OUTPUT:
        if (final_ptr is not None) and (pid_s == nsegments - 1):
            at = offs_n[None, :].to(tl.int64) * nvalues + offs_p[:, None]
            tl.store(final_ptr + head * size + at, state, mask=mask_pn)
    else:
        inside_p = tl.where(maps, nkeys, nvalues) > offs_p
        last_rows = (head * nsegments + pid_s) * width + tl.where(maps, nvalues, 0) + offs_p[:, None]
        tl.store(after_ptr + last_rows * nkeys + offs_n[None, :], state, mask=inside_p[:, None] & mask_n[None, :])


@triton.jit
def _delta_pass_kernel(
    after_ptr, initial_ptr, before_ptr, nsegments, nheads, nkeys, nvalues,
    stride_i_s, stride_i_h, stride_i_n, stride_i_p,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of values, heads, sequences): a program joins the segments of its rows of the transposed state.

    ``after`` holds for each segment its state from zero and its map, ``before`` gets the state before each segment.
    """
    pid_h = tl.program_id(1)
    seq = tl.program_id(2).to(tl.int64)
    offs_p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = offs_n < nkeys
    mask_pn = (offs_p < nvalues)[:, None] & mask_n[None, :]
    head = seq * nheads + pid_h
    state = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    if initial_ptr is not None:
        at = offs_p[:, None].to(tl.int64) * stride_i_p + offs_n[None, :] * stride_i_n
        initial_rows = initial_ptr + seq * stride_i_s + pid_h.to(tl.int64) * stride_i_h
        state = tl.load(initial_rows + at, mask=mask_pn, other=0.0).to(tl.float32)
    width = nvalues + nkeys
    own_at = offs_p[:, None] * nkeys + offs_n[None, :]
    map_at = (nvalues + offs_n[:, None]) * nkeys + offs_n[None, :]
    first = head * nsegments
    tl.store(before_ptr + first * nvalues * nkeys + own_at, state, mask=mask_pn)
    for s in tl.range(0, nsegments - 1, num_stages=2):
        rows = after_ptr + (first + s) * width * nkeys
        own = tl.load(rows + own_at, mask=mask_pn, other=0.0)
        map_ = tl.load(rows + map_at, mask=mask_n[:, None] & mask_n[None, :], other=0.0)
        state = dot(state, map_, own, PRECISION)
        tl.store(before_ptr + (first + s + 1) * nvalues * nkeys + own_at, state, mask=mask_pn)


@triton.jit
def _delta_step_kernel(
    q_ptr, k_ptr, r_ptr, v_ptr, g_ptr, beta_ptr, A_ptr, bias_ptr, state_ptr, new_ptr, y_ptr,
    source_ptr, target_ptr, accepted_ptr, offsets_ptr,
    ntokens, nheads, ngroups, nkeys, nvalues, scale, lower, beta_limit,
    stride_q_b, stride_q_t, stride_q_g, stride_k_b, stride_k_t, stride_k_g, stride_r_b, stride_r_t, stride_r_h,
    stride_v_b, stride_v_t, stride_v_h, stride_g_b, stride_g_t, stride_g_h, stride_g_n, stride_beta_b, stride_beta_t,
    stride_beta_h, stride_bias_h, stride_bias_n, stride_s_b, stride_s_h, stride_s_n, stride_s_p,
    stride_n_b, stride_n_h, stride_n_n, stride_n_p, stride_y_b, stride_y_t, stride_y_h,
    rows, slots, pad, columns, kept, stride_source_k, stride_source_m, stride_target_k, stride_target_m,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, GATE: tl.constexpr, BETA: tl.constexpr, NORMALIZE: tl.constexpr,
    ERASE: tl.constexpr, KEYED: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of values, heads, sequences): a program owns BLOCK_P values of one head's state, for all tokens.

    Reads and writes its part of the state once. Both what the key and what the query read come from the decayed state:
    y = qᵀ S + (q·k) u. Float32. Slots as in the step of `ssd`.
    """
    offs_p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    offs_n = tl.arange(0, BLOCK_N)
    pid_h = tl.program_id(1)
    pid_b = tl.program_id(2).to(tl.int64)
    pid_g = pid_h // (nheads // ngroups)
    mask_n = offs_n < nkeys
    mask_p = offs_p < nvalues
    mask = mask_n[:, None] & mask_p[None, :]
    row, read, write = pid_b, pid_b, pid_b
    if target_ptr is not None:
        read, write, valid, nothing = place(source_ptr, target_ptr, accepted_ptr, pid_b, slots, pad, columns,
                                            stride_source_k, stride_source_m, stride_target_k)  # fmt: skip
        if offsets_ptr is not None:
            begin, end = sequence(offsets_ptr, pid_b, True, rows)
            row = begin.to(tl.int64)
            ntokens = end - begin
            valid &= end > begin
        mask = spread(valid, mask)
    state_at = read * stride_s_b + pid_h.to(tl.int64) * stride_s_h
    at = offs_n[:, None].to(tl.int64) * stride_s_n + offs_p[None, :].to(tl.int64) * stride_s_p
    state = tl.load(state_ptr + state_at + at, mask=mask, other=0.0).to(tl.float32)
    new_at = pid_h.to(tl.int64) * stride_n_h
    new_at += offs_n[:, None].to(tl.int64) * stride_n_n + offs_p[None, :].to(tl.int64) * stride_n_p
    A = 0.0
    if A_ptr is not None:
        A = tl.load(A_ptr + pid_h).to(tl.float32)
    for t in range(ntokens):
        q = tl.load(q_ptr + row * stride_q_b + t * stride_q_t + pid_g * stride_q_g + offs_n, mask=mask_n, other=0.0)
        k = tl.load(k_ptr + row * stride_k_b + t * stride_k_t + pid_g * stride_k_g + offs_n, mask=mask_n, other=0.0)
        v = tl.load(v_ptr + row * stride_v_b + t * stride_v_t + pid_h * stride_v_h + offs_p, mask=mask_p, other=0.0)
        q = q.to(tl.float32)
        k = k.to(tl.float32)
        if NORMALIZE:
            q *= 1.0 / tl.sqrt(tl.sum(q * q, axis=0) + NORM_EPS)
            k *= 1.0 / tl.sqrt(tl.sum(k * k, axis=0) + NORM_EPS)
        q *= scale
        if g_ptr is not None:
            g_row = g_ptr + row * stride_g_b + t * stride_g_t + pid_h * stride_g_h
            if KEYED:
                bias = gate_bias(bias_ptr, pid_h, offs_n, mask_n, stride_bias_h, stride_bias_n)
                g = tl.load(g_row + offs_n * stride_g_n, mask=mask_n, other=0.0)
                state *= tl.exp(log_decay(g, A, bias, lower, GATE))[:, None]
            else:
                bias = 0.0
                if bias_ptr is not None:
                    bias = tl.load(bias_ptr + pid_h * stride_bias_h).to(tl.float32)
                state *= tl.exp(log_decay(tl.load(g_row), A, bias, lower, GATE))
        beta = 1.0
        if BETA != "one":
            beta = tl.load(beta_ptr + row * stride_beta_b + t * stride_beta_t + pid_h * stride_beta_h).to(tl.float32)
            if BETA == "sigmoid":
                beta = beta_limit * share(beta)
        u = v.to(tl.float32)
        if ERASE:
            r = k
            if r_ptr is not None:
                r_row = r_ptr + row * stride_r_b + t * stride_r_t + pid_h * stride_r_h
                r = tl.load(r_row + offs_n, mask=mask_n, other=0.0).to(tl.float32)
            u -= tl.sum(state * r[:, None], axis=0)
        u *= beta
        y = tl.sum(state * q[:, None], axis=0) + tl.sum(q * k, axis=0) * u
        state += k[:, None] * u[None, :]
        if target_ptr is not None:
            y = tl.where(valid, y, nothing)
        y_row = y_ptr + row * stride_y_b + t * stride_y_t + pid_h * stride_y_h
        tl.store(y_row + offs_p, y.to(y_ptr.dtype.element_ty), mask=mask_p)
        if accepted_ptr is not None:
            slot, own = place_of_token(target_ptr, pid_b, t, slots, pad, kept, stride_target_k, stride_target_m)
            tl.store(
                new_ptr + slot * stride_n_b + new_at,
                state.to(new_ptr.dtype.element_ty),
                mask=spread(own, mask),
            )
    if accepted_ptr is None:
        tl.store(new_ptr + write * stride_n_b + new_at, state.to(new_ptr.dtype.element_ty), mask=mask)
