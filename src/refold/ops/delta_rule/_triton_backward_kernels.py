"""The Triton kernels of the delta rule's backward pass, for a decay per head.

The forward chain runs once more and writes U and the state S before each chunk. From the last chunk to the first, with
dS' the gradient of the state after the chunk and T the inverse without its factor beta,

    dU = Pᵀ dY + K⁻ dS'      W = Tᵀ dU      dS = (Q⁺)ᵀ dY - (beta R⁺)ᵀ W + e^c_last dS'

which `chain` writes (W, dS'). All other gradients are sums over pairs of tokens of one chunk, and products with S and
dS'; `queries` and `keys` form them, for all heads of a group in order, so that gradients of shared queries and keys are
the same from run to run. The gradient of a log decay is a sum of what straddles its token: no difference of large
numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from refold.ops.delta_rule._triton_kernels import row_norm, slot_span, span
from refold.ops.triton.math import dot, exp2

ROWS = tl.constexpr(8)


@triton.jit
def _delta_chain_bwd_kernel(
    q_ptr, k_ptr, T_ptr, P_ptr, rows_ptr, dy_ptr, dstate_ptr, cu_seqlens_ptr, w_ptr, dstates_ptr, dinitial_ptr,
    seqlen, nchunks, nheads, ngroups, nkeys, nvalues,
    stride_q_b, stride_q_t, stride_q_g, stride_k_b, stride_k_t, stride_k_g, stride_y_b, stride_y_t, stride_y_h,
    CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, ERASE: tl.constexpr, VARLEN: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (heads x tiles, sequences): a program owns one tile of values of one head, from the last chunk to the first.

    Keeps the transposed gradient of the state (values, keys) in float32 registers.
    """
    blocks_p = tl.cdiv(nvalues, BLOCK_P)
    pid_h = tl.program_id(0) // blocks_p
    seq = tl.program_id(1)
    pid_g = (pid_h // (nheads // ngroups)).to(tl.int64)
    batch, begin, tokens, first_slot = span(cu_seqlens_ptr, seq, seqlen, nchunks, CHUNK, VARLEN)
    batch, begin = batch.to(tl.int64), begin.to(tl.int64)
    count = tl.cdiv(tokens, CHUNK)
    offs_t = tl.arange(0, CHUNK)
    offs_n = tl.arange(0, BLOCK_N)
    offs_p = tl.program_id(0) % blocks_p * BLOCK_P + tl.arange(0, BLOCK_P)
    mask_n = offs_n < nkeys
    mask_p = offs_p < nvalues
    mask_pn = mask_p[:, None] & mask_n[None, :]
    state_at = (seq.to(tl.int64) * nheads + pid_h) * nkeys * nvalues + offs_n[None, :] * nvalues + offs_p[:, None]
    dstate = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    if dstate_ptr is not None:
        dstate = tl.load(dstate_ptr + state_at, mask=mask_pn, other=0.0).to(tl.float32)
    q_base = q_ptr + batch * stride_q_b + begin * stride_q_t + pid_g * stride_q_g
    k_base = k_ptr + batch * stride_k_b + begin * stride_k_t + pid_g * stride_k_g
    for i in tl.range(0, count, num_stages=STAGES):
        chunk = count - 1 - i
        start = begin * 0 + chunk * CHUNK
        inside = offs_t < tokens - chunk * CHUNK
        row = (first_slot.to(tl.int64) + chunk) * nheads + pid_h
        square = row * (CHUNK * CHUNK) + offs_t[:, None] * CHUNK + offs_t[None, :]
        mask_tn = inside[:, None] & mask_n[None, :]
        k = tl.load(k_base + start * stride_k_t + offs_t[:, None] * stride_k_t + offs_n[None, :],
                    mask=mask_tn, other=0.0)  # fmt: skip
        rows = rows_ptr + row * (ROWS * CHUNK) + offs_t
        narrow = dstate.to(k.dtype)
        tl.store(dstates_ptr + (row * nvalues + offs_p[:, None]) * nkeys + offs_n[None, :], narrow, mask=mask_pn)
        du = dot(narrow, tl.trans(k), None, PRECISION) * tl.load(rows + 2 * CHUNK)[None, :]
        dstate *= tl.load(rows_ptr + row * (ROWS * CHUNK) + 3 * CHUNK)
        # In a product, what is not finite would reach the tokens after it as well: zero times it is NaN.
        last = tl.full((BLOCK_P,), -1, tl.int32)
        if dy_ptr is not None:
            dy_base = dy_ptr + batch * stride_y_b + begin * stride_y_t + pid_h.to(tl.int64) * stride_y_h
            dy_at = start * stride_y_t + offs_t[None, :] * stride_y_t + offs_p[:, None]
            dy = tl.load(dy_base + dy_at, mask=mask_p[:, None] & inside[None, :], other=0.0)
            finite = tl.abs(dy.to(tl.float32)) < float("inf")
            last = tl.max(tl.where(finite, -1, offs_t[None, :]), axis=1)
            dy = tl.where(finite, dy, 0.0).to(k.dtype)
            du = dot(dy, tl.load(P_ptr + square), du, PRECISION)
            q = tl.load(q_base + start * stride_q_t + offs_t[:, None] * stride_q_t + offs_n[None, :],
                        mask=mask_tn, other=0.0)  # fmt: skip
            weighted = (dy.to(tl.float32) * tl.load(rows + CHUNK)[None, :]).to(k.dtype)
            dstate = dot(weighted, q, dstate, PRECISION)
        spoilt = last  # without an eraser, what is written before has no part in it
        finite = tl.abs(du) < float("inf")
        last = tl.maximum(last, tl.max(tl.where(finite, -1, offs_t[None, :]), axis=1))
        w = dot(tl.where(finite, du, 0.0).to(k.dtype), tl.load(T_ptr + square), None, PRECISION)
        w = tl.where(offs_t[None, :] <= last[:, None], float("nan"), w)
        tl.store(w_ptr + (row * CHUNK + offs_t[None, :]) * nvalues + offs_p[:, None], w.to(k.dtype),
                 mask=mask_p[:, None])  # fmt: skip
        if ERASE:
            spoilt = last
        dstate *= tl.where(spoilt >= 0, float("nan"), 1.0)[:, None]
        if ERASE:
            read = tl.load(rows) * tl.load(rows + 4 * CHUNK)
            dstate = dot((w * -read[None, :]).to(k.dtype), k, dstate, PRECISION)
    if dinitial_ptr is not None:
        tl.store(dinitial_ptr + state_at, dstate, mask=mask_pn)


@triton.jit
def _norm_gradient(d, tile, factor, NORMALIZE: tl.constexpr):
    """Return the gradient of a row from that of the row that was normalised with ``factor``."""
    if NORMALIZE:
        y = tile.to(tl.float32) * factor[:, None]
        d = factor[:, None] * (d - y * tl.sum(y * d, axis=1)[:, None])
    return d


@triton.jit
def _straddling(pairs, after, before, offs_t):
    """Return for each t the sum over pairs i >= t > j, of ``after`` over i >= t and of ``before`` over j < t."""
    from_t = offs_t[:, None] >= offs_t[None, :]
    finite = tl.abs(pairs) < float("inf")
    bad = tl.min(tl.where(finite, offs_t.shape[0], offs_t[None, :]), axis=1)
    pairs = tl.where(finite, pairs, 0.0)
    earlier = tl.cumsum(pairs, axis=1) - pairs
    earlier = tl.where(offs_t[None, :] > bad[:, None], float("nan"), earlier)
    found = tl.sum(tl.where(from_t, earlier + after[:, None], 0.0), axis=0)
    return found + tl.sum(tl.where(from_t, 0.0, before[:, None]), axis=0)


@triton.jit
def _delta_queries_bwd_kernel(
    q_ptr, k_ptr, dy_ptr, u_ptr, states_ptr, rows_ptr, cu_seqlens_ptr, dq_ptr, dg_ptr,
    seqlen, nchunks, nseqs, nheads, ngroups, nkeys, nvalues, scale,
    stride_q_b, stride_q_t, stride_q_g, stride_k_b, stride_k_t, stride_k_g, stride_y_b, stride_y_t, stride_y_h,
    CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, NORMALIZE: tl.constexpr, VARLEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (slots, groups): a program owns one chunk of one group, and takes its heads in order.

    Writes the gradient of queries, and the part of the log decay's that outputs have. Sums in float32.
    """
    slot = tl.program_id(0)
    pid_g = tl.program_id(1)
    batch, start, length = slot_span(cu_seqlens_ptr, slot, seqlen, nchunks, nseqs, CHUNK, VARLEN)
    batch, start = batch.to(tl.int64), start.to(tl.int64)
    offs_t = tl.arange(0, CHUNK)
    offs_n = tl.arange(0, BLOCK_N)
    offs_p = tl.arange(0, BLOCK_P)
    inside = offs_t < length
    mask_n = offs_n < nkeys
    mask_p = offs_p < nvalues
    mask_tn = inside[:, None] & mask_n[None, :]
    mask_tp = inside[:, None] & mask_p[None, :]
    q_at = batch * stride_q_b + (start + offs_t[:, None]) * stride_q_t + pid_g.to(tl.int64) * stride_q_g
    k_at = batch * stride_k_b + (start + offs_t[:, None]) * stride_k_t + pid_g.to(tl.int64) * stride_k_g
    q = tl.load(q_ptr + q_at + offs_n[None, :], mask=mask_tn, other=0.0)
    k = tl.load(k_ptr + k_at + offs_n[None, :], mask=mask_tn, other=0.0)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    q_norm, k_norm = row_norm(q, NORMALIZE), row_norm(k, NORMALIZE)
    causal = offs_t[:, None] >= offs_t[None, :]
    dq = tl.zeros((CHUNK, BLOCK_N), tl.float32)
    repeat = nheads // ngroups
    for each in tl.range(0, repeat, num_stages=1):
        pid_h = pid_g.to(tl.int64) * repeat + each
        row = slot.to(tl.int64) * nheads + pid_h
        rows = rows_ptr + row * (ROWS * CHUNK) + offs_t
        dy_at = batch * stride_y_b + (start + offs_t[:, None]) * stride_y_t + pid_h * stride_y_h + offs_p[None, :]
        dy = tl.load(dy_ptr + dy_at, mask=mask_tp, other=0.0)
        states_at = (row * nvalues + offs_p[:, None]) * nkeys + offs_n[None, :]
        state = tl.load(states_ptr + states_at, mask=(offs_p < nvalues)[:, None] & mask_n[None, :], other=0.0)
        query = tl.load(rows + CHUNK)
        part = dot(dy, state, None, PRECISION)
        after = query * tl.sum(q.to(tl.float32) * part, axis=1)
        dq += part * (query / q_norm)[:, None]
        high, low = tl.load(rows + 5 * CHUNK), tl.load(rows + 6 * CHUNK)
        between = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
        grown = exp2(tl.where(causal, between, 0.0)) * (k_norm * scale)[None, :]
        own_at = (row * CHUNK + offs_t[:, None]) * nvalues + offs_p[None, :]
        u = tl.load(u_ptr + own_at, mask=mask_p[None, :], other=0.0)
        dP = tl.where(causal, dot(dy, tl.trans(u), None, PRECISION) * grown, 0.0)
        dq += dot(dP.to(dtype), k, None, PRECISION)
        if dg_ptr is not None:
            pairs = dP * dot(q, tl.trans(k), None, PRECISION) * q_norm[:, None]
            dg = _straddling(pairs, after, after * 0.0, offs_t)
            tl.store(dg_ptr + (batch * seqlen + start + offs_t) * nheads + pid_h, dg, mask=inside)
    dq = _norm_gradient(dq, q, q_norm, NORMALIZE)
    out_at = ((batch * seqlen + start + offs_t[:, None]) * ngroups + pid_g) * nkeys + offs_n[None, :]
    tl.store(dq_ptr + out_at, dq.to(dq_ptr.dtype.element_ty), mask=mask_tn)


@triton.jit
def _delta_keys_bwd_kernel(
    q_ptr, k_ptr, v_ptr, dy_ptr, u_ptr, w_ptr, states_ptr, dstates_ptr, rows_ptr, cu_seqlens_ptr,
    dk_ptr, dv_ptr, dg_ptr, dbeta_ptr,
    seqlen, nchunks, nseqs, nheads, ngroups, nkeys, nvalues, scale,
    stride_q_b, stride_q_t, stride_q_g, stride_k_b, stride_k_t, stride_k_g, stride_v_b, stride_v_t, stride_v_h,
    stride_y_b, stride_y_t, stride_y_h,
    CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, NORMALIZE: tl.constexpr, ERASE: tl.constexpr,
    VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (slots, groups): as `_delta_queries_bwd_kernel`, for the gradients of keys, values and strengths.

    Adds to the gradient of the log decay, if outputs have written their part of it, what states and keys have.
    """
    slot = tl.program_id(0)
    pid_g = tl.program_id(1)
    batch, start, length = slot_span(cu_seqlens_ptr, slot, seqlen, nchunks, nseqs, CHUNK, VARLEN)
    batch, start = batch.to(tl.int64), start.to(tl.int64)
    offs_t = tl.arange(0, CHUNK)
    offs_n = tl.arange(0, BLOCK_N)
    offs_p = tl.arange(0, BLOCK_P)
    inside = offs_t < length
    mask_n = offs_n < nkeys
    mask_p = offs_p < nvalues
    mask_tn = inside[:, None] & mask_n[None, :]
    mask_tp = inside[:, None] & mask_p[None, :]
    mask_pn = mask_p[:, None] & mask_n[None, :]
    q_at = batch * stride_q_b + (start + offs_t[:, None]) * stride_q_t + pid_g.to(tl.int64) * stride_q_g
    k_at = batch * stride_k_b + (start + offs_t[:, None]) * stride_k_t + pid_g.to(tl.int64) * stride_k_g
    k = tl.load(k_ptr + k_at + offs_n[None, :], mask=mask_tn, other=0.0)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    k_norm = row_norm(k, NORMALIZE)
    up_to = offs_t[:, None] <= offs_t[None, :]
    earlier = offs_t[:, None] < offs_t[None, :]
    strict = offs_t[:, None] > offs_t[None, :]
    dk = tl.zeros((CHUNK, BLOCK_N), tl.float32)
    repeat = nheads // ngroups
    for each in tl.range(0, repeat, num_stages=1):
        pid_h = pid_g.to(tl.int64) * repeat + each
        row = slot.to(tl.int64) * nheads + pid_h
        rows = rows_ptr + row * (ROWS * CHUNK) + offs_t
        beta, high, low = tl.load(rows + 4 * CHUNK), tl.load(rows + 5 * CHUNK), tl.load(rows + 6 * CHUNK)
        own_at = (row * CHUNK + offs_t[:, None]) * nvalues + offs_p[None, :]
        u = tl.load(u_ptr + own_at, mask=mask_p[None, :], other=0.0)
        states_at = (row * nvalues + offs_p[:, None]) * nkeys + offs_n[None, :]
        state = tl.load(states_ptr + states_at, mask=mask_pn, other=0.0)
        dstate = tl.load(dstates_ptr + states_at, mask=mask_pn, other=0.0)
        everywhere = tl.sum(tl.sum(state.to(tl.float32) * dstate.to(tl.float32), axis=1), axis=0)
        everywhere *= tl.load(rows_ptr + row * (ROWS * CHUNK) + 3 * CHUNK)
        write = tl.load(rows + 2 * CHUNK)
        part = dot(u, dstate, None, PRECISION)
        before = write * tl.sum(k.to(tl.float32) * part, axis=1)
        dk += part * (write / k_norm)[:, None]
        if dy_ptr is not None:
            dy_at = batch * stride_y_b + (start + offs_t[:, None]) * stride_y_t + pid_h * stride_y_h + offs_p[None, :]
            dy = tl.load(dy_ptr + dy_at, mask=mask_tp, other=0.0)
            between = (high[None, :] - high[:, None]) + (low[None, :] - low[:, None])
            dP = dot(u, tl.trans(dy), None, PRECISION) * exp2(tl.where(up_to, between, 0.0))
            q = tl.load(q_ptr + q_at + offs_n[None, :], mask=mask_tn, other=0.0)
            dP *= (row_norm(q, NORMALIZE) * scale)[None, :]
            dk += dot(tl.where(up_to, dP, 0.0).to(dtype), q, None, PRECISION)
        w = tl.load(w_ptr + own_at, mask=mask_p[None, :], other=0.0)
        v_at = batch * stride_v_b + (start + offs_t[:, None]) * stride_v_t + pid_h * stride_v_h + offs_p[None, :]
        v = tl.load(v_ptr + v_at, mask=mask_tp, other=0.0)
        dbeta = tl.sum(v.to(tl.float32) * w.to(tl.float32), axis=1)
        y_at = ((batch * seqlen + start + offs_t[:, None]) * nheads + pid_h) * nvalues + offs_p[None, :]
        tl.store(dv_ptr + y_at, (w.to(tl.float32) * beta[:, None]).to(dv_ptr.dtype.element_ty), mask=mask_tp)
        after = tl.zeros((CHUNK,), tl.float32)
        pairs = tl.zeros((CHUNK, CHUNK), tl.float32)
        if ERASE:
            between = (high[None, :] - high[:, None]) + (low[None, :] - low[:, None])
            dL = dot(u, tl.trans(w), None, PRECISION) * -exp2(tl.where(earlier, between, 0.0))
            dL *= (k_norm * beta)[None, :]
            dk += dot(tl.where(earlier, dL, 0.0).to(dtype), k, None, PRECISION)
            read = tl.load(rows)
            dr = dot(w, state, None, PRECISION)
            after -= read * beta * tl.sum(k.to(tl.float32) * dr, axis=1)
            dr *= -(read / k_norm)[:, None]
            between = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
            dL = dot(w, tl.trans(u), None, PRECISION) * -exp2(tl.where(strict, between, 0.0)) * k_norm[None, :]
            dL = tl.where(strict, dL, 0.0)
            dr += dot(dL.to(dtype), k, None, PRECISION)
            dbeta += k_norm * tl.sum(k.to(tl.float32) * dr, axis=1)
            dk += dr * beta[:, None]
            pairs += dL * dot(k, tl.trans(k), None, PRECISION) * (k_norm * beta)[:, None]
        token = (batch * seqlen + start + offs_t) * nheads + pid_h
        tl.store(dbeta_ptr + token, dbeta, mask=inside)
        if dg_ptr is not None:
            dg = _straddling(pairs, after, before, offs_t) + everywhere
            if dy_ptr is not None:
                dg += tl.load(dg_ptr + token, mask=inside, other=0.0)
            tl.store(dg_ptr + token, dg, mask=inside)
    dk = _norm_gradient(dk, k, k_norm, NORMALIZE)
    out_at = ((batch * seqlen + start + offs_t[:, None]) * ngroups + pid_g) * nkeys + offs_n[None, :]
    tl.store(dk_ptr + out_at, dk.to(dk_ptr.dtype.element_ty), mask=mask_tn)
