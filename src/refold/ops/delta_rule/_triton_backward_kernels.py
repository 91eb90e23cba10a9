"""The Triton kernels of the delta rule's backward pass, in the chunks of `_triton_kernels`, whose names they use.

`prepare` and `chain` of the forward pass come first: they leave for each chunk T, P, the state S that enters it, U, and
X = (I + diag(beta) M)⁻¹ with M = strict(R Kᵀ) ∘ e^(c_i - c_j). Then

    chain   walks over the chunks from the last one, with the transposed gradient D of the state in registers:
            dU = Pᵀ dY + K⁻ D      W = Xᵀ dU      dV = beta W      D' = e^c_last D + (Q⁺)ᵀ dY - (R⁺)ᵀ dV
    heads   per chunk and group: what is left is sums over pairs of tokens of a chunk and over a state. With
            A = tril(dY Uᵀ) and B = -strict(W Uᵀ), of diag(beta) M,
            dQ = e^c (dY Sᵀ) + (A ∘ e^(c_i - c_j)) K, ...
    keyed   the same with one decay per key, per chunk, head and slice of keys: level by level, as in `prepare_keyed`
    finish  adds the heads of a group, always in the same order

`pass` joins segments: that of the forward pass, with transposed maps, from the last segment to the first.

A log decay multiplies whatever goes from before its token to the token or later. Its gradient is the sum of just these
terms: pairs of tokens around it, what is read from S later, what is written before, and S itself. The shorter form,
q∘dq + r∘dr - k∘dk summed over later tokens, is a difference of larger numbers.

No product has as a factor a transposed result of another one: Triton 3.6 miscompiles that on Hopper. Both of A and Aᵀ
are products of what was loaded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from refold.ops.delta_rule._triton_kernels import diagonal, row_norm, slot_span, span
from refold.ops.triton.math import dot, exp2


@triton.jit
def _delta_bwd_chain_kernel(
    q_ptr, r_ptr, k_ptr, dy_ptr, X_ptr, P_ptr, rows_ptr, more_ptr, decay_ptr, dfinal_ptr, before_ptr, cu_seqlens_ptr,
    leaving_ptr, W_ptr, dv_ptr, dinitial_ptr, after_ptr,
    seqlen, nchunks, nsegments, nheads, ngroups, nkeys, nvalues,
    stride_q_b, stride_q_t, stride_q_g, stride_r_b, stride_r_t, stride_r_h, stride_k_b, stride_k_t, stride_k_g,
    stride_dy_b, stride_dy_t, stride_dy_h,
    CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, KEYED: tl.constexpr, ERASE: tl.constexpr,
    OUTPUT: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (heads x tiles of values, segments, sequences), as `_delta_chain_kernel`, from the last chunk to the first.

    OUTPUT: begins with the gradient of the state after its segment; writes for each chunk that of the state after it, W
    and dv. Otherwise it begins with zero, and writes the gradient of the state before its segment, the first left out.
    """
    blocks_p = tl.cdiv(nvalues, BLOCK_P)
    pid_h = tl.program_id(0) // blocks_p
    pid_s = tl.program_id(1)
    if not OUTPUT:
        pid_s += 1
    seq = tl.program_id(2)
    pid_g = (pid_h // (nheads // ngroups)).to(tl.int64)
    batch, begin, tokens, first_slot = span(cu_seqlens_ptr, seq, seqlen, nchunks, CHUNK, VARLEN)
    batch, begin = batch.to(tl.int64), begin.to(tl.int64)
    count = tl.cdiv(tokens, CHUNK)
    piece = tl.cdiv(count, nsegments)
    offs_t = tl.arange(0, CHUNK)
    offs_n = tl.arange(0, BLOCK_N)
    offs_p = tl.program_id(0) % blocks_p * BLOCK_P + tl.arange(0, BLOCK_P)
    mask_n = offs_n < nkeys
    mask_p = offs_p < nvalues
    mask_pn = mask_p[:, None] & mask_n[None, :]
    head = seq.to(tl.int64) * nheads + pid_h
    state = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    if OUTPUT:
        if before_ptr is not None:
            start_rows = before_ptr + ((head * nsegments + pid_s) * nvalues + offs_p[:, None]) * nkeys
            state = tl.load(start_rows + offs_n[None, :], mask=mask_pn, other=0.0)
        elif dfinal_ptr is not None:
            at = (head * nkeys + offs_n[None, :]) * nvalues + offs_p[:, None]
            state = tl.load(dfinal_ptr + at, mask=mask_pn, other=0.0).to(tl.float32)
    dy_base = dy_ptr + batch * stride_dy_b + begin * stride_dy_t + pid_h.to(tl.int64) * stride_dy_h
    dv_first = ((batch * seqlen + begin) * nheads + pid_h) * nvalues
    q_base = q_ptr + batch * stride_q_b + begin * stride_q_t + pid_g * stride_q_g
    k_base = k_ptr + batch * stride_k_b + begin * stride_k_t + pid_g * stride_k_g
    r_base = k_base
    if r_ptr is not None:
        r_base = r_ptr + batch * stride_r_b + begin * stride_r_t + pid_h.to(tl.int64) * stride_r_h
    first = pid_s * piece
    last = tl.minimum(first + piece, count)
    for i in tl.range(first, last, num_stages=STAGES):
        chunk = first + last - 1 - i
        start = begin * 0 + chunk * CHUNK
        inside = offs_t < tokens - chunk * CHUNK
        row = (first_slot.to(tl.int64) + chunk) * nheads + pid_h
        square = row * (CHUNK * CHUNK) + offs_t[:, None] * CHUNK + offs_t[None, :]
        mask_tn = inside[:, None] & mask_n[None, :]
        if KEYED:
            tile_at = (row * CHUNK + offs_t[:, None]) * nkeys + offs_n[None, :]
            k = tl.load(k_ptr + tile_at, mask=mask_n[None, :], other=0.0)
            q = tl.load(q_ptr + tile_at, mask=mask_n[None, :], other=0.0)
        else:
            k = tl.load(k_base + start * stride_k_t + offs_t[:, None] * stride_k_t + offs_n[None, :],
                        mask=mask_tn, other=0.0)  # fmt: skip
            q = tl.load(q_base + start * stride_q_t + offs_t[:, None] * stride_q_t + offs_n[None, :],
                        mask=mask_tn, other=0.0)  # fmt: skip
        dy_at = start * stride_dy_t + offs_t[None, :] * stride_dy_t + offs_p[:, None]
        dy = tl.load(dy_base + dy_at, mask=mask_p[:, None] & inside[None, :], other=0.0)
        P = tl.load(P_ptr + square)
        rows = rows_ptr + row * (4 * CHUNK) + offs_t
        query = tl.load(rows + CHUNK)
        write = tl.load(rows + 2 * CHUNK)
        beta = tl.load(more_ptr + row * (5 * CHUNK) + offs_t)
        narrow = state.to(k.dtype)
        du = dot(narrow, tl.trans(k), None, PRECISION) * write[None, :]
        du = dot(dy, P, du, PRECISION)
        if ERASE:
            X = tl.load(X_ptr + square)
            w = dot(du.to(k.dtype), X, None, PRECISION)
        else:
            w = du
        dv = w * beta[None, :]
        if OUTPUT:
            state_at = (row * nvalues + offs_p[:, None]) * nkeys + offs_n[None, :]
            tl.store(leaving_ptr + state_at, narrow, mask=mask_pn)
            w_at = (row * CHUNK + offs_t[None, :]) * nvalues + offs_p[:, None]
            tl.store(W_ptr + w_at, w.to(W_ptr.dtype.element_ty), mask=mask_p[:, None])
            dv_at = (start + offs_t[None, :]).to(tl.int64) * (nheads * nvalues) + offs_p[:, None]
            tl.store(dv_ptr + dv_first + dv_at, dv.to(dv_ptr.dtype.element_ty), mask=mask_p[:, None] & inside[None, :])
        if KEYED:
            state *= tl.load(decay_ptr + row * nkeys + offs_n, mask=mask_n, other=0.0)[None, :]
        else:
            state *= tl.load(rows_ptr + row * (4 * CHUNK) + 3 * CHUNK)
        state = dot((dy.to(tl.float32) * query[None, :]).to(k.dtype), q, state, PRECISION)
        if ERASE:
            read = tl.load(rows)
            if KEYED:
                r = tl.load(r_ptr + tile_at, mask=mask_n[None, :], other=0.0)
            elif r_ptr is not None:
                r = tl.load(r_base + start * stride_r_t + offs_t[:, None] * stride_r_t + offs_n[None, :],
                            mask=mask_tn, other=0.0)  # fmt: skip
            else:
                r = k
            state = dot((dv * -read[None, :]).to(k.dtype), r, state, PRECISION)
    if OUTPUT:
        if (dinitial_ptr is not None) and (pid_s == 0):
            at = (head * nkeys + offs_n[None, :]) * nvalues + offs_p[:, None]
            tl.store(dinitial_ptr + at, state, mask=mask_pn)
    else:
        last_rows = (head * nsegments + pid_s) * nvalues + offs_p[:, None]
        tl.store(after_ptr + last_rows * nkeys + offs_n[None, :], state, mask=mask_pn)


@triton.jit
def _delta_bwd_pass_kernel(
    own_ptr, after_ptr, dfinal_ptr, before_ptr, nsegments, nheads, nkeys, nvalues,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of values, heads, sequences): as `_delta_pass_kernel`, for gradients of states.

    ``own`` holds for each segment but the first the gradient of the state before it, from zero, ``after`` the maps of
    the forward pass; ``before`` gets the gradient of the state after each segment.
    """
    pid_h = tl.program_id(1)
    seq = tl.program_id(2).to(tl.int64)
    offs_p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = offs_n < nkeys
    mask_pn = (offs_p < nvalues)[:, None] & mask_n[None, :]
    head = seq * nheads + pid_h
    state = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    if dfinal_ptr is not None:
        at = (head * nkeys + offs_n[None, :]) * nvalues + offs_p[:, None]
        state = tl.load(dfinal_ptr + at, mask=mask_pn, other=0.0).to(tl.float32)
    for i in tl.range(0, nsegments, num_stages=2):
        segment = head * nsegments + nsegments - 1 - i
        at = (segment * nvalues + offs_p[:, None]) * nkeys + offs_n[None, :]
        tl.store(before_ptr + at, state, mask=mask_pn)
        if i < nsegments - 1:
            own = tl.load(own_ptr + at, mask=mask_pn, other=0.0)
            map_at = (segment * (nvalues + nkeys) + nvalues + offs_n[None, :]) * nkeys + offs_n[:, None]
            map_ = tl.load(after_ptr + map_at, mask=mask_n[:, None] & mask_n[None, :], other=0.0)
            state = dot(state, map_, own, PRECISION)


@triton.jit
def _delta_bwd_heads_kernel(
    q_ptr, r_ptr, k_ptr, v_ptr, dy_ptr, P_ptr, rows_ptr, more_ptr, entering_ptr, leaving_ptr, u_ptr, W_ptr,
    cu_seqlens_ptr, dq_ptr, dk_ptr, dr_ptr, dg_ptr, dbeta_ptr,
    seqlen, nchunks, nseqs, nheads, ngroups, nkeys, nvalues, scale,
    stride_q_b, stride_q_t, stride_q_g, stride_r_b, stride_r_t, stride_r_h, stride_k_b, stride_k_t, stride_k_g,
    stride_v_b, stride_v_t, stride_v_h, stride_dy_b, stride_dy_t, stride_dy_h,
    CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCKS_P: tl.constexpr,
    NORMALIZE: tl.constexpr, ERASE: tl.constexpr, TWO: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (slots, groups): a program goes over the heads of a group, and writes all gradients but that of v.

    Those of q and k stay in registers until the last head.
    """
    slot = tl.program_id(0)
    pid_g = tl.program_id(1)
    batch, start, length = slot_span(cu_seqlens_ptr, slot, seqlen, nchunks, nseqs, CHUNK, VARLEN)
    batch, start = batch.to(tl.int64), start.to(tl.int64)
    heads = nheads // ngroups
    offs_t = tl.arange(0, CHUNK)
    offs_n = tl.arange(0, BLOCK_N)
    offs_c = tl.arange(0, BLOCK_P)
    inside = offs_t < length
    mask_n = offs_n < nkeys
    mask_tn = inside[:, None] & mask_n[None, :]
    there = (offs_c * 0 + length) > 0
    q_rows = q_ptr + batch * stride_q_b + start * stride_q_t + pid_g.to(tl.int64) * stride_q_g
    k_rows = k_ptr + batch * stride_k_b + start * stride_k_t + pid_g.to(tl.int64) * stride_k_g
    q = tl.load(q_rows + offs_t[:, None] * stride_q_t + offs_n[None, :], mask=mask_tn, other=0.0)
    k = tl.load(k_rows + offs_t[:, None] * stride_k_t + offs_n[None, :], mask=mask_tn, other=0.0)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    causal = offs_t[:, None] >= offs_t[None, :]
    later = offs_t[:, None] > offs_t[None, :]
    dq = tl.zeros((CHUNK, BLOCK_N), tl.float32)
    dk = tl.zeros((CHUNK, BLOCK_N), tl.float32)
    for i in range(heads):
        pid_h = pid_g * heads + i
        row = slot.to(tl.int64) * nheads + pid_h
        rows = rows_ptr + row * (4 * CHUNK)
        more = more_ptr + row * (5 * CHUNK)
        beta = tl.load(more + offs_t)
        q_factor = tl.load(more + CHUNK + offs_t)
        k_factor = tl.load(more + 2 * CHUNK + offs_t)
        c = tl.load(more + 3 * CHUNK + offs_t)
        between = c[:, None] - c[None, :]
        to_end = tl.load(more + 4 * CHUNK - 1) - c
        if TWO:
            low = tl.load(more + 4 * CHUNK + offs_t)
            between += low[:, None] - low[None, :]
            to_end += tl.load(more + 5 * CHUNK - 1) - low
        since = exp2(c)
        until = exp2(to_end)
        dy_rows = dy_ptr + batch * stride_dy_b + start * stride_dy_t + pid_h.to(tl.int64) * stride_dy_h
        v_rows = v_ptr + batch * stride_v_b + start * stride_v_t + pid_h.to(tl.int64) * stride_v_h
        A = tl.zeros((CHUNK, CHUNK), tl.float32)
        A_turned = tl.zeros((CHUNK, CHUNK), tl.float32)
        B = tl.zeros((CHUNK, CHUNK), tl.float32)
        B_turned = tl.zeros((CHUNK, CHUNK), tl.float32)
        dbeta = tl.zeros((CHUNK,), tl.float32)
        for block in range(BLOCKS_P):
            offs_p = block * BLOCK_P + offs_c
            mask_tp = inside[:, None] & (offs_p < nvalues)[None, :]
            at = (row * CHUNK + offs_t[:, None]) * nvalues + offs_p[None, :]
            dy = tl.load(dy_rows + offs_t[:, None] * stride_dy_t + offs_p[None, :], mask=mask_tp, other=0.0)
            u = tl.load(u_ptr + at, mask=mask_tp, other=0.0)
            w = tl.load(W_ptr + at, mask=mask_tp, other=0.0)
            A = dot(dy, tl.trans(u), A, PRECISION)
            A_turned = dot(u, tl.trans(dy), A_turned, PRECISION)
            if ERASE:
                B = dot(w, tl.trans(u), B, PRECISION)
                B_turned = dot(u, tl.trans(w), B_turned, PRECISION)
            v = tl.load(v_rows + offs_t[:, None] * stride_v_t + offs_p[None, :], mask=mask_tp, other=0.0)
            dbeta += tl.sum(w.to(tl.float32) * v.to(tl.float32), axis=1)

        # What is between two tokens of the chunk. [i, j] is of a later token i, or turned, of a later token j.
        grown = exp2(tl.where(causal, between, 0.0))
        grown_turned = exp2(tl.where(causal, 0.0, -between))
        P = tl.load(P_ptr + row * (CHUNK * CHUNK) + offs_t[:, None] * CHUNK + offs_t[None, :]).to(tl.float32)
        pairs = tl.where(later, A * P, 0.0)
        A = tl.where(causal, A * grown, 0.0)
        A_turned = tl.where(offs_t[:, None] <= offs_t[None, :], A_turned * grown_turned, 0.0)
        dq = dot((A * k_factor[None, :]).to(dtype), k, dq, PRECISION)
        dk = dot((A_turned * q_factor[None, :]).to(dtype), q, dk, PRECISION)
        if ERASE:
            r = k
            r_factor = k_factor
            if r_ptr is not None:
                r_rows = r_ptr + batch * stride_r_b + start * stride_r_t + pid_h.to(tl.int64) * stride_r_h
                r = tl.load(r_rows + offs_t[:, None] * stride_r_t + offs_n[None, :], mask=mask_tn, other=0.0)
                r_factor = tl.full((CHUNK,), 1.0, tl.float32)
            B = tl.where(later, B * grown, 0.0)
            M = dot(r, tl.trans(k), None, PRECISION) * r_factor[:, None] * k_factor[None, :]
            M = tl.where(later, -B * M, 0.0)
            dbeta += tl.sum(M, axis=1)
            pairs += M * beta[:, None]
            B *= -beta[:, None]
            B_turned = tl.where(offs_t[:, None] < offs_t[None, :], -B_turned * grown_turned, 0.0) * beta[None, :]
            if r_ptr is not None:
                dr = dot((B * k_factor[None, :]).to(dtype), k, None, PRECISION)
                dk = dot(B_turned.to(dtype), r, dk, PRECISION)
            else:
                dk = dot(((B + B_turned) * k_factor[None, :]).to(dtype), k, dk, PRECISION)
        dg = tl.sum(tl.where(later, tl.cumsum(pairs, axis=0, reverse=True), 0.0), axis=1)

        # What is between a token and the state before the chunk, or the one after it.
        from_start = tl.zeros((CHUNK, BLOCK_N), tl.float32)
        read = tl.zeros((CHUNK, BLOCK_N), tl.float32)
        to_state = tl.zeros((CHUNK, BLOCK_N), tl.float32)
        kept = tl.zeros((BLOCK_N,), tl.float32)
        for block in range(BLOCKS_P):
            offs_p = block * BLOCK_P + offs_c
            mask_p = (offs_p < nvalues) & there
            mask_tp = inside[:, None] & mask_p[None, :]
            mask_pn = mask_p[:, None] & mask_n[None, :]
            at = (row * CHUNK + offs_t[:, None]) * nvalues + offs_p[None, :]
            state_at = (row * nvalues + offs_p[:, None]) * nkeys + offs_n[None, :]
            entering = tl.load(entering_ptr + state_at, mask=mask_pn, other=0.0)
            leaving = tl.load(leaving_ptr + state_at, mask=mask_pn, other=0.0)
            dy = tl.load(dy_rows + offs_t[:, None] * stride_dy_t + offs_p[None, :], mask=mask_tp, other=0.0)
            u = tl.load(u_ptr + at, mask=mask_tp, other=0.0)
            from_start = dot(dy, entering, from_start, PRECISION)
            to_state = dot(u, leaving, to_state, PRECISION)
            kept += tl.sum(entering.to(tl.float32) * leaving.to(tl.float32), axis=0)
            if ERASE:
                w = tl.load(W_ptr + at, mask=mask_tp, other=0.0)
                read = dot(w, entering, read, PRECISION)
        dq += from_start * since[:, None]
        dk += to_state * until[:, None]
        after = since * q_factor * tl.sum(from_start * q.to(tl.float32), axis=1)
        before = until * k_factor * tl.sum(to_state * k.to(tl.float32), axis=1)
        if ERASE:
            overlap = since * r_factor * tl.sum(read * r.to(tl.float32), axis=1)
            dbeta -= overlap
            after -= beta * overlap
            read *= (-beta * since)[:, None]
            if r_ptr is not None:
                dr_rows = dr_ptr + ((batch * seqlen + start + offs_t[:, None]) * nheads + pid_h) * nkeys
                tl.store(dr_rows + offs_n[None, :], (dr + read).to(dr_ptr.dtype.element_ty), mask=mask_tn)
            else:
                dk += read
        token = (batch * seqlen + start + offs_t) * nheads + pid_h
        if dg_ptr is not None:
            dg += tl.sum(tl.where(offs_t[None, :] >= offs_t[:, None], after[None, :], before[None, :]), axis=1)
            dg += tl.sum(kept, axis=0) * tl.load(rows + 3 * CHUNK)
            tl.store(dg_ptr + token, dg, mask=inside)
        if dbeta_ptr is not None:
            tl.store(dbeta_ptr + token, dbeta, mask=inside)
    _store_gradient(dq_ptr, dq * scale, q, batch * seqlen + start, pid_g, ngroups, nkeys, inside, NORMALIZE)
    _store_gradient(dk_ptr, dk, k, batch * seqlen + start, pid_g, ngroups, nkeys, inside, NORMALIZE)


@triton.jit
def _store_gradient(ptr, gradient, tile, first, pid_g, ngroups, nkeys, inside, NORMALIZE: tl.constexpr):
    """Store the gradient of the tokens of a group, from that of keys or queries of length one."""
    offs_t = tl.arange(0, tile.shape[0])
    offs_n = tl.arange(0, tile.shape[1])
    if NORMALIZE:
        factor = row_norm(tile, NORMALIZE)
        unit = tile.to(tl.float32) * factor[:, None]
        gradient = factor[:, None] * (gradient - unit * tl.sum(unit * gradient, axis=1)[:, None])
    rows = ptr + ((first + offs_t[:, None]) * ngroups + pid_g) * nkeys + offs_n[None, :]
    tl.store(rows, gradient.to(ptr.dtype.element_ty), mask=inside[:, None] & (offs_n < nkeys)[None, :])


@triton.jit
def _delta_bwd_keyed_kernel(
    q_ptr, r_ptr, k_ptr, v_ptr, dy_ptr, c_ptr, more_ptr, entering_ptr, leaving_ptr, u_ptr, W_ptr,
    cu_seqlens_ptr, dq_ptr, dk_ptr, dr_ptr, dg_ptr, dbeta_ptr,
    seqlen, nchunks, nseqs, nheads, ngroups, nkeys, nvalues,
    stride_q_b, stride_q_t, stride_q_g, stride_r_b, stride_r_t, stride_r_h, stride_k_b, stride_k_t, stride_k_g,
    stride_v_b, stride_v_t, stride_v_h, stride_dy_b, stride_dy_t, stride_dy_h,
    CHUNK: tl.constexpr, LEVELS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCKS_P: tl.constexpr,
    ERASE: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (slots, heads, slices of keys): a program writes the gradients of BLOCK_N keys of a head.

    Those of q and k are of one head, float32, and of keys of length one; that of beta is the share of the slice.
    """
    slot = tl.program_id(0)
    pid_h = tl.program_id(1)
    pid_n = tl.program_id(2)
    pid_g = pid_h // (nheads // ngroups)
    batch, start, length = slot_span(cu_seqlens_ptr, slot, seqlen, nchunks, nseqs, CHUNK, VARLEN)
    batch, start = batch.to(tl.int64), start.to(tl.int64)
    offs_t = tl.arange(0, CHUNK)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_c = tl.arange(0, BLOCK_P)
    inside = offs_t < length
    mask_n = offs_n < nkeys
    mask_tn = inside[:, None] & mask_n[None, :]
    there = (offs_c * 0 + length) > 0
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    row = slot.to(tl.int64) * nheads + pid_h
    dy_rows = dy_ptr + batch * stride_dy_b + start * stride_dy_t + pid_h.to(tl.int64) * stride_dy_h
    v_rows = v_ptr + batch * stride_v_b + start * stride_v_t + pid_h.to(tl.int64) * stride_v_h
    more = more_ptr + row * (5 * CHUNK) + offs_t
    beta = tl.load(more)
    A = tl.zeros((CHUNK, CHUNK), tl.float32)
    A_turned = tl.zeros((CHUNK, CHUNK), tl.float32)
    B = tl.zeros((CHUNK, CHUNK), tl.float32)
    B_turned = tl.zeros((CHUNK, CHUNK), tl.float32)
    from_start = tl.zeros((CHUNK, BLOCK_N), tl.float32)
    read = tl.zeros((CHUNK, BLOCK_N), tl.float32)
    to_state = tl.zeros((CHUNK, BLOCK_N), tl.float32)
    kept = tl.zeros((BLOCK_N,), tl.float32)
    dbeta = tl.zeros((CHUNK,), tl.float32)
    for block in range(BLOCKS_P):
        offs_p = block * BLOCK_P + offs_c
        mask_p = (offs_p < nvalues) & there
        mask_tp = inside[:, None] & mask_p[None, :]
        mask_pn = mask_p[:, None] & mask_n[None, :]
        at = (row * CHUNK + offs_t[:, None]) * nvalues + offs_p[None, :]
        state_at = (row * nvalues + offs_p[:, None]) * nkeys + offs_n[None, :]
        dy = tl.load(dy_rows + offs_t[:, None] * stride_dy_t + offs_p[None, :], mask=mask_tp, other=0.0)
        u = tl.load(u_ptr + at, mask=mask_tp, other=0.0)
        w = tl.load(W_ptr + at, mask=mask_tp, other=0.0)
        entering = tl.load(entering_ptr + state_at, mask=mask_pn, other=0.0)
        leaving = tl.load(leaving_ptr + state_at, mask=mask_pn, other=0.0)
        A = dot(dy, tl.trans(u), A, PRECISION)
        A_turned = dot(u, tl.trans(dy), A_turned, PRECISION)
        from_start = dot(dy, entering, from_start, PRECISION)
        to_state = dot(u, leaving, to_state, PRECISION)
        kept += tl.sum(entering.to(tl.float32) * leaving.to(tl.float32), axis=0)
        if ERASE:
            B = dot(w, tl.trans(u), B, PRECISION)
            B_turned = dot(u, tl.trans(w), B_turned, PRECISION)
            read = dot(w, entering, read, PRECISION)
        first = (offs_t * 0 + pid_n) == 0  # the slice that counts what has no keys
        v = tl.load(v_rows + offs_t[:, None] * stride_v_t + offs_p[None, :], mask=mask_tp & first[:, None], other=0.0)
        dbeta += tl.sum(w.to(tl.float32) * v.to(tl.float32), axis=1)
    own = diagonal(A)

    q_rows = q_ptr + batch * stride_q_b + start * stride_q_t + pid_g.to(tl.int64) * stride_q_g + offs_n[None, :]
    k_rows = k_ptr + batch * stride_k_b + start * stride_k_t + pid_g.to(tl.int64) * stride_k_g + offs_n[None, :]
    q = tl.load(q_rows + offs_t[:, None] * stride_q_t, mask=mask_tn, other=0.0)
    k = tl.load(k_rows + offs_t[:, None] * stride_k_t, mask=mask_tn, other=0.0)
    q_wide = q.to(tl.float32) * tl.load(more + CHUNK)[:, None]
    k_wide = k.to(tl.float32) * tl.load(more + 2 * CHUNK)[:, None]
    r_wide = k_wide
    if r_ptr is not None:
        r_rows = r_ptr + batch * stride_r_b + start * stride_r_t + pid_h.to(tl.int64) * stride_r_h + offs_n[None, :]
        r_wide = tl.load(r_rows + offs_t[:, None] * stride_r_t, mask=mask_tn, other=0.0).to(tl.float32)
    c_rows = c_ptr + row * CHUNK * nkeys + offs_n[None, :]
    c = tl.load(c_rows + offs_t[:, None] * nkeys, mask=mask_n[None, :], other=0.0)
    total = tl.load(c_ptr + (row * CHUNK + CHUNK - 1) * nkeys + offs_n, mask=mask_n, other=0.0)
    since = exp2(c.to(tl.float32))
    dq = from_start * since
    dk = to_state * exp2((total[None, :] - c).to(tl.float32))
    after = q_wide * dq
    before = k_wide * dk
    dq += own[:, None] * k_wide
    dk += own[:, None] * q_wide
    if ERASE:
        dr = -read * since  # without beta
        after += r_wide * dr * beta[:, None]
    reaches = offs_t[None, :] >= offs_t[:, None]
    dg = dot(tl.where(reaches, 1.0, 0.0).to(dtype), after.to(dtype), None, PRECISION)
    dg = dot(tl.where(reaches, 0.0, 1.0).to(dtype), before.to(dtype), dg, PRECISION)
    dg += (kept * exp2(total.to(tl.float32)))[None, :]
    for level in range(0, LEVELS):
        half = offs_t >> level
        later = half % 2 == 1
        reference = ((half >> 1) * 2 + 1) << level
        between = c - tl.load(c_rows + reference[:, None] * nkeys, mask=mask_n[None, :], other=0.0)
        shrunk = exp2(tl.where(later[:, None], between, -between).to(tl.float32))
        q_shrunk = q_wide * shrunk
        k_shrunk = k_wide * shrunk
        pairs = later[:, None] & (half[:, None] == half[None, :] + 1)
        pairs_turned = later[None, :] & (half[None, :] == half[:, None] + 1)
        dq_level = dot(tl.where(pairs, A, 0.0).to(dtype), k_shrunk.to(dtype), None, PRECISION)
        dk_level = dot(tl.where(pairs_turned, A_turned, 0.0).to(dtype), q_shrunk.to(dtype), None, PRECISION)
        through = q_shrunk * dq_level
        if ERASE:
            r_shrunk = r_wide * shrunk
            dr_level = dot(tl.where(pairs, -B, 0.0).to(dtype), k_shrunk.to(dtype), None, PRECISION)
            turned = tl.where(pairs_turned, -B_turned * beta[None, :], 0.0).to(dtype)
            dk_level = dot(turned, r_shrunk.to(dtype), dk_level, PRECISION)
            dr += dr_level * shrunk
            through += r_shrunk * dr_level * beta[:, None]
        dq += dq_level * shrunk
        dk += dk_level * shrunk
        through += k_shrunk * dk_level
        side = tl.where(later[:, None], offs_t[None, :] >= offs_t[:, None], offs_t[None, :] < offs_t[:, None])
        sums = tl.where(side & (half[:, None] == half[None, :]), 1.0, 0.0).to(dtype)
        dg = dot(sums, through.to(dtype), dg, PRECISION)
    token = (batch * seqlen + start + offs_t) * nheads + pid_h
    at = token[:, None] * nkeys + offs_n[None, :]
    if ERASE:
        dbeta += tl.sum(r_wide * dr, axis=1)
        dr *= beta[:, None]
        if r_ptr is not None:
            tl.store(dr_ptr + at, dr.to(dr_ptr.dtype.element_ty), mask=mask_tn)
        else:
            dk += dr
    tl.store(dq_ptr + at, dq, mask=mask_tn)
    tl.store(dk_ptr + at, dk, mask=mask_tn)
    tl.store(dg_ptr + at, dg, mask=mask_tn)
    if dbeta_ptr is not None:
        tl.store(dbeta_ptr + token * tl.num_programs(2) + pid_n, dbeta, mask=inside)


@triton.jit
def _delta_bwd_finish_kernel(
    part_ptr, x_ptr, dx_ptr, tokens, seqlen, nheads, ngroups, nkeys, scale, stride_x_b, stride_x_t, stride_x_g,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of tokens, groups): a program adds up the gradients of the heads of a group."""
    pid_g = tl.program_id(1)
    heads = nheads // ngroups
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_n = tl.arange(0, BLOCK_N)
    mask = (token < tokens)[:, None] & (offs_n < nkeys)[None, :]
    total = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for i in range(heads):
        at = (token[:, None] * nheads + pid_g * heads + i) * nkeys + offs_n[None, :]
        total += tl.load(part_ptr + at, mask=mask, other=0.0)
    x_rows = x_ptr + token // seqlen * stride_x_b + token % seqlen * stride_x_t + pid_g.to(tl.int64) * stride_x_g
    x = tl.load(x_rows[:, None] + offs_n[None, :], mask=mask, other=0.0)
    first = tl.program_id(0).to(tl.int64) * BLOCK_T
    _store_gradient(dx_ptr, total * scale, x, first, pid_g, ngroups, nkeys, token < tokens, NORMALIZE)
