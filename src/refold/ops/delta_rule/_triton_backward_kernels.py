"""The Triton kernels of the delta rule's backward pass, in the chunks of `_triton_kernels`, whose names they use.

`prepare` and `chain` of the forward pass come first: they leave for each chunk T, P, the state S that enters it, U, and
X = (I + diag(beta) M)⁻¹ with M = strict(R Kᵀ) ∘ e^(c_i - c_j). Then

    chain   walks over the chunks from the last one, with the transposed gradient D of the state in registers:
            dU = Pᵀ dY + K⁻ D      W = Xᵀ dU      dV = beta W      D' = e^c_last D + (Q⁺)ᵀ dY - (R⁺)ᵀ dV
    pairs   per chunk and group: what is left is sums over pairs of tokens of a chunk and over a state. With
            A = tril(dY Uᵀ) and B = -strict(W Uᵀ), of diag(beta) M,
            dQ = e^c (dY Sᵀ) + (A ∘ e^(c_i - c_j)) K, ...
    keyed   the same with a decay per key, per chunk, head and slice of keys: level by level, as in `prepare_keyed`
    finish  adds the heads of a group, always in the same order
    gates   goes back to gates and strengths as they were given

`pass` joins segments: that of the forward pass, with transposed maps, from the last segment to the first.

A log decay multiplies whatever goes from before its token to the token or later. Its gradient is the sum of just these
terms: pairs of tokens around it, what is read from S later, what is written before, and S itself. The shorter form,
q∘dq + r∘dr - k∘dk summed over later tokens, is a difference of larger numbers: it is used inside of 16 tokens alone, of
the same products of 16-bit factors.

Values that are not finite: the chain writes W and dv with NaN where the definition has it, as the forward chain writes
U. What goes over pairs multiplies zeros by them, too; it raises a flag, and is done again where a flag is up: values of
zero in place of those that are not finite, and NaN in what `nonfinite` names.

No product has as a factor a transposed result of another one: Triton 3.6 miscompiles that on Hopper. Both of A and Aᵀ
are products of what was loaded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from refold.ops.delta_rule._triton_kernels import (
    NEAR,
    diagonal,
    load_gates,
    log_decay,
    row_norm,
    share,
    slot_span,
    span,
)
from refold.ops.triton.math import dot, exp2, softplus


@triton.jit
def _bad(tile):
    """1 where a tile is not finite, else 0."""
    return tl.where(tl.abs(tile.to(tl.float32)) < float("inf"), 0, 1)


@triton.jit
def _delta_bwd_chain_kernel(
    q_ptr, r_ptr, k_ptr, dy_ptr, X_ptr, P_ptr, rows_ptr, more_ptr, decay_ptr, dfinal_ptr, before_ptr, cu_seqlens_ptr,
    leaving_ptr, W_ptr, dv_ptr, dinitial_ptr, after_ptr, flags_ptr,
    seqlen, nchunks, nsegments, nheads, ngroups, nkeys, nvalues,
    stride_q_b, stride_q_t, stride_q_g, stride_r_b, stride_r_t, stride_r_h, stride_k_b, stride_k_t, stride_k_g,
    stride_dy_b, stride_dy_t, stride_dy_h,
    CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, KEYED: tl.constexpr, ERASE: tl.constexpr,
    OUTPUT: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (heads x tiles of values, segments, sequences), as `_delta_chain_kernel`, from the last chunk to the first.

    OUTPUT: begins with the gradient of the state after its segment; writes for each chunk that of the state after it, W
    and dv. Otherwise it begins with zero, and writes the gradient of the state before its segment, the first left out.
    Flags, one for each 64 values: only where one is up.
    """
    blocks_p = tl.cdiv(nvalues, BLOCK_P)
    pid_h = tl.program_id(0) // blocks_p
    pid_s = tl.program_id(1)
    if not OUTPUT:
        pid_s += 1
    seq = tl.program_id(2)
    if flags_ptr is not None:
        segment = (seq.to(tl.int64) * nheads + pid_h) * nsegments + pid_s
        if tl.load(flags_ptr + segment * tl.cdiv(nvalues, 64) + tl.program_id(0) % blocks_p * BLOCK_P // 64) == 0:
            return
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
        if ERASE:  # what is not finite spoils earlier tokens, but in a product later ones as well
            read = tl.load(rows)
            finite = _bad(dy) == 0
            du = dot(tl.where(finite, dy, 0.0).to(dy.dtype), P, du, PRECISION)
            finite = finite & (_bad(du) == 0)
            bad = tl.max(tl.where(finite, -1, offs_t[None, :]), axis=1)  # the last token that is not, a channel
            bad = tl.maximum(bad, tl.max(tl.where(_bad(read) > 0, offs_t, 0), axis=0) - 1)
            X = tl.load(X_ptr + square)
            w = dot(tl.where(finite, du, 0.0).to(k.dtype), X, None, PRECISION)
            w = tl.where(offs_t[None, :] <= bad[:, None], float("nan"), w)
        else:
            du = dot(dy, P, du, PRECISION)
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
def _load(ptrs, mask, CAREFUL: tl.constexpr):
    """Load a tile; CAREFUL: with zeros for what is not finite."""
    tile = tl.load(ptrs, mask=mask, other=0.0)
    if CAREFUL:
        tile = tl.where(_bad(tile) > 0, 0.0, tile).to(tile.dtype)
    return tile


@triton.jit
def _of_values(
    dy_rows, stride_dy, v_rows, stride_v, u_rows, w_rows, entering, leaving, inside, counted, mask_n, offs_n, nkeys,
    nvalues,
    QUERIES: tl.constexpr, READS: tl.constexpr, KEYS: tl.constexpr, ERASE: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCKS_P: tl.constexpr, PRECISION: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """Go over the values, once, for all that sums over them, and return what is asked for.

    QUERIES: dY S and dY Uᵀ. READS: W S, W Uᵀ, and the sums of W V of the tokens ``counted``. KEYS: U D, U dYᵀ, U Wᵀ,
    and the sums of S D, D being the gradient of the state after the chunk. S and D are (values, keys).
    """
    zeros = tl.zeros((inside.shape[0], offs_n.shape[0]), tl.float32)
    square = tl.zeros((inside.shape[0], inside.shape[0]), tl.float32)
    dy_state, w_state, u_state = zeros, zeros, zeros
    dy_u, w_u, u_dy, u_w = square, square, square, square
    w_v = tl.zeros((inside.shape[0],), tl.float32)
    kept = tl.zeros((offs_n.shape[0],), tl.float32)
    offs_t = tl.arange(0, inside.shape[0])
    for block in range(BLOCKS_P):
        offs_p = block * BLOCK_P + tl.arange(0, BLOCK_P)
        mask_p = offs_p < nvalues
        mask = inside[:, None] & mask_p[None, :]
        mask_pn = mask_p[:, None] & mask_n[None, :]
        at = offs_t[:, None] * nvalues + offs_p[None, :]
        state_at = offs_p[:, None] * nkeys + offs_n[None, :]
        u = _load(u_rows + at, mask, CAREFUL)
        if QUERIES or KEYS:
            dy = _load(dy_rows + offs_t[:, None] * stride_dy + offs_p[None, :], mask, CAREFUL)
        if READS or (KEYS and ERASE):
            w = _load(w_rows + at, mask, CAREFUL)
        before = _load(entering + state_at, mask_pn, CAREFUL)
        if QUERIES:
            dy_state = dot(dy, before, dy_state, PRECISION)
            dy_u = dot(dy, tl.trans(u), dy_u, PRECISION)
        if READS and ERASE:
            w_state = dot(w, before, w_state, PRECISION)
            w_u = dot(w, tl.trans(u), w_u, PRECISION)
        if KEYS:
            after = _load(leaving + state_at, mask_pn, CAREFUL)
            u_state = dot(u, after, u_state, PRECISION)
            u_dy = dot(u, tl.trans(dy), u_dy, PRECISION)
            if ERASE:
                u_w = dot(u, tl.trans(w), u_w, PRECISION)
            kept += tl.sum(before.to(tl.float32) * after.to(tl.float32), axis=0)
        if READS:
            mask = counted[:, None] & mask_p[None, :]
            v = _load(v_rows + offs_t[:, None] * stride_v + offs_p[None, :], mask, CAREFUL)
            w_v += tl.sum(w.to(tl.float32) * v.to(tl.float32), axis=1)
    return dy_state, dy_u, w_state, w_u, w_v, u_state, u_dy, u_w, kept


@triton.jit
def _bad_rows(rows, stride, inside, nvalues, BLOCK_P: tl.constexpr, BLOCKS_P: tl.constexpr):
    """1 for each token with a value that is not finite."""
    found = tl.zeros((inside.shape[0],), tl.int32)
    offs_t = tl.arange(0, inside.shape[0])
    for block in range(BLOCKS_P):
        offs_p = block * BLOCK_P + tl.arange(0, BLOCK_P)
        mask = inside[:, None] & (offs_p < nvalues)[None, :]
        tile = tl.load(rows + offs_t[:, None] * stride + offs_p[None, :], mask=mask, other=0.0)
        found = tl.maximum(found, tl.max(_bad(tile), axis=1))
    return found


@triton.jit
def _bad_keys(state, mask_n, offs_n, nkeys, nvalues, BLOCK_P: tl.constexpr, BLOCKS_P: tl.constexpr):
    """1 for each key with an element of a state, (values, keys), that is not finite."""
    found = tl.zeros((offs_n.shape[0],), tl.int32)
    for block in range(BLOCKS_P):
        offs_p = block * BLOCK_P + tl.arange(0, BLOCK_P)
        mask = (offs_p < nvalues)[:, None] & mask_n[None, :]
        tile = tl.load(state + offs_p[:, None] * nkeys + offs_n[None, :], mask=mask, other=0.0)
        found = tl.maximum(found, tl.max(_bad(tile), axis=0))
    return found


@triton.jit
def _spoiled(q, k, r, g, beta, dy, v, u, w, entering, leaving):
    """Count what spoils the gradients of q, k, r and g, (tokens, keys), and of beta, (tokens,), as `nonfinite` says.

    Given is where operands are not finite: tiles of q, k, r and of log decays, (tokens, keys or 1); beta, dy, v, U and
    W by token; the state and its gradient by key.
    """
    wrote = tl.maximum(u[:, None], k)
    earlier = tl.cumsum(wrote, axis=0)  # what the state after a token holds
    asked = tl.cumsum(tl.maximum(dy[:, None], q), axis=0, reverse=True)  # and its gradient
    erased = tl.maximum(tl.maximum(w, beta)[:, None], tl.maximum(r, g))
    later = tl.cumsum(erased, axis=0, reverse=True)
    before = earlier - wrote + entering[None, :]
    dk = u[:, None] + leaving[None, :] + asked + later - erased
    dr = tl.maximum(w, beta)[:, None] + before + g
    dg = before + leaving[None, :] + asked + later
    dq = dy[:, None] + earlier + entering[None, :]
    return dq, dk, dr, dg, w + v + tl.sum(r + before + g, axis=1)


@triton.jit
def _bad_decays(
    rows, A_ptr, bias_ptr, pid_h, inside, offs_n, mask_n, stride_n, stride_bias_h, stride_bias_n, lower,
    GATE: tl.constexpr,
):  # fmt: skip
    """1 where a log decay is not finite; one of -inf is a decay of zero."""
    g, A, bias = load_gates(rows, A_ptr, bias_ptr, pid_h, inside, offs_n, mask_n, stride_n, stride_bias_h,
                             stride_bias_n)  # fmt: skip
    mask = inside[:, None] & mask_n[None, :]
    return tl.where(mask, tl.where(log_decay(g, A, bias, lower, GATE) < float("inf"), 0, 1), 0)


@triton.jit
def _straddling(pairs, after, before, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """Sum for each token the pairs [i, j] of it or a later token i with an earlier one j, ``after`` and ``before``."""
    offs_t = tl.arange(0, pairs.shape[0])
    reached = offs_t[None, :] >= offs_t[:, None]
    earlier = offs_t[None, :] < offs_t[:, None]
    sums = dot(tl.where(reached, 1.0, 0.0).to(dtype), tl.where(earlier, pairs, 0.0).to(dtype), None, PRECISION)
    return tl.sum(tl.where(earlier, sums, 0.0) + tl.where(reached, after[None, :], before[None, :]), axis=1)


@triton.jit
def _sums_over(ones, terms, acc, PRECISION: tl.constexpr):
    """Add to ``acc`` sums of terms, those where a row of ``ones`` has a one; of 16 bits, terms have two parts."""
    high = terms.to(ones.dtype)
    total = dot(ones, high, acc, PRECISION)
    if ones.dtype != tl.float32:
        total = dot(ones, (terms - high.to(tl.float32)).to(ones.dtype), total, PRECISION)
    return total


@triton.jit
def _where_spoiled(gradient, count):
    return tl.where(count > 0, float("nan"), gradient)


@triton.jit
def _queries(
    q_ptr, k_ptr, dy_ptr, P_ptr, more_ptr, entering_ptr, u_ptr, flags_ptr, dq_ptr, dg_ptr,
    slot, pid_g, batch, start, length, flag, seqlen, nheads, ngroups, nkeys, nvalues, scale,
    stride_q_b, stride_q_t, stride_q_g, stride_k_b, stride_k_t, stride_k_g, stride_dy_b, stride_dy_t, stride_dy_h,
    CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCKS_P: tl.constexpr,
    NORMALIZE: tl.constexpr, TWO: tl.constexpr, PRECISION: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """Write the gradient of q, which stays in registers until the last head.

    Writes also what queries add to the gradient of the log decays, and a flag: whether the gradient is not finite
    somewhere.
    """
    heads = nheads // ngroups
    offs_t = tl.arange(0, CHUNK)
    offs_n = tl.arange(0, BLOCK_N)
    inside = offs_t < length
    mask_n = offs_n < nkeys
    mask_tn = inside[:, None] & mask_n[None, :]
    q_at = q_ptr + batch * stride_q_b + start * stride_q_t + pid_g.to(tl.int64) * stride_q_g
    k_at = k_ptr + batch * stride_k_b + start * stride_k_t + pid_g.to(tl.int64) * stride_k_g
    q_at += offs_t[:, None] * stride_q_t + offs_n[None, :]
    k_at += offs_t[:, None] * stride_k_t + offs_n[None, :]
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    dq = tl.zeros((CHUNK, BLOCK_N), tl.float32)
    for i in tl.range(0, heads, disable_licm=True):  # what does not change in it would fill the registers
        pid_h = pid_g * heads + i
        row = slot.to(tl.int64) * nheads + pid_h
        more = more_ptr + row * (5 * CHUNK)
        q_factor = _load(more + CHUNK + offs_t, inside, CAREFUL)
        k_factor = _load(more + 2 * CHUNK + offs_t, inside, CAREFUL)
        c = tl.load(more + 3 * CHUNK + offs_t)
        since = exp2(c)
        between = c[:, None] - c[None, :]
        if TWO:
            low = tl.load(more + 4 * CHUNK + offs_t)
            between += low[:, None] - low[None, :]
        causal = offs_t[:, None] >= offs_t[None, :]
        dy_rows = dy_ptr + batch * stride_dy_b + start * stride_dy_t + pid_h.to(tl.int64) * stride_dy_h
        u_rows = u_ptr + row * CHUNK * nvalues
        entering = entering_ptr + row * nvalues * nkeys
        token = (batch * seqlen + start + offs_t) * nheads + pid_h
        part, A, _, _, _, _, _, _, _ = _of_values(
            dy_rows, stride_dy_t, dy_rows, stride_dy_t, u_rows, u_rows, entering, entering, inside, inside, mask_n,
            offs_n, nkeys, nvalues, True, False, False, True, BLOCK_P, BLOCKS_P, PRECISION, CAREFUL,
        )  # fmt: skip
        part *= since[:, None]
        dq += part
        if dg_ptr is not None:
            q = _load(q_at, mask_tn, CAREFUL)
            square = row * (CHUNK * CHUNK) + offs_t[:, None] * CHUNK + offs_t[None, :]
            pairs = A * _load(P_ptr + square, causal, CAREFUL).to(tl.float32)
            dg = _straddling(pairs, q_factor * tl.sum(part * q.to(tl.float32), axis=1), q_factor * 0.0, dtype,
                             PRECISION)  # fmt: skip
            tl.store(dg_ptr + token, dg, mask=inside)
        A = tl.where(causal, A * exp2(tl.where(causal, between, 0.0)), 0.0)
        dq = dot((A * k_factor[None, :]).to(dtype), _load(k_at, mask_tn, CAREFUL), dq, PRECISION)
        if CAREFUL:
            wrote = _bad(tl.load(k_at, mask=mask_tn, other=0.0) * tl.load(more + 2 * CHUNK + offs_t)[:, None])
            wrote = tl.maximum(wrote, _bad_rows(u_rows, nvalues, inside, nvalues, BLOCK_P, BLOCKS_P)[:, None])
            bad = _bad_keys(entering, mask_n, offs_n, nkeys, nvalues, BLOCK_P, BLOCKS_P)[None, :]
            bad += _bad_rows(dy_rows, stride_dy_t, inside, nvalues, BLOCK_P, BLOCKS_P)[:, None]
            dq = _where_spoiled(dq, bad + tl.cumsum(wrote, axis=0))
    if (not CAREFUL) and (flags_ptr is not None):
        tl.store(flags_ptr + flag, tl.max(tl.max(_bad(dq), axis=1), axis=0))
    q = tl.load(q_at, mask=mask_tn, other=0.0)
    _store_gradient(dq_ptr, dq * scale, q, batch * seqlen + start, pid_g, ngroups, nkeys, inside, NORMALIZE)


@triton.jit
def _keys(
    q_ptr, r_ptr, k_ptr, v_ptr, g_ptr, A_ptr, bias_ptr, dy_ptr, rows_ptr, more_ptr, entering_ptr, leaving_ptr, u_ptr,
    W_ptr, flags_ptr, dgq_ptr, dk_ptr, dr_ptr, dg_ptr, dbeta_ptr,
    slot, pid_g, batch, start, length, flag, seqlen, nheads, ngroups, nkeys, nvalues, lower,
    stride_q_b, stride_q_t, stride_q_g, stride_r_b, stride_r_t, stride_r_h, stride_k_b, stride_k_t, stride_k_g,
    stride_v_b, stride_v_t, stride_v_h, stride_dy_b, stride_dy_t, stride_dy_h,
    stride_g_b, stride_g_t, stride_g_h, stride_g_n, stride_bias_h, stride_bias_n,
    CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCKS_P: tl.constexpr, NORMALIZE: tl.constexpr,
    ERASE: tl.constexpr, GATE: tl.constexpr, TWO: tl.constexpr, PRECISION: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """Write all other gradients but that of v, after `_queries`, and raise its flag for them."""
    heads = nheads // ngroups
    offs_t = tl.arange(0, CHUNK)
    offs_n = tl.arange(0, BLOCK_N)
    inside = offs_t < length
    mask_n = offs_n < nkeys
    mask_tn = inside[:, None] & mask_n[None, :]
    q_at = q_ptr + batch * stride_q_b + start * stride_q_t + pid_g.to(tl.int64) * stride_q_g
    k_at = k_ptr + batch * stride_k_b + start * stride_k_t + pid_g.to(tl.int64) * stride_k_g
    q_at += offs_t[:, None] * stride_q_t + offs_n[None, :]
    k_at += offs_t[:, None] * stride_k_t + offs_n[None, :]
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    dk = tl.zeros((CHUNK, BLOCK_N), tl.float32)
    for i in tl.range(0, heads, disable_licm=True):  # what does not change in it would fill the registers
        pid_h = pid_g * heads + i
        row = slot.to(tl.int64) * nheads + pid_h
        more = more_ptr + row * (5 * CHUNK)
        beta = _load(more + offs_t, inside, CAREFUL)
        q_factor = _load(more + CHUNK + offs_t, inside, CAREFUL)
        k_factor = _load(more + 2 * CHUNK + offs_t, inside, CAREFUL)
        c = tl.load(more + 3 * CHUNK + offs_t)
        to_end = tl.load(more + 4 * CHUNK - 1) - c
        between = c[:, None] - c[None, :]
        if TWO:
            low = tl.load(more + 4 * CHUNK + offs_t)
            to_end += tl.load(more + 5 * CHUNK - 1) - low
            between += low[:, None] - low[None, :]
        dy_rows = dy_ptr + batch * stride_dy_b + start * stride_dy_t + pid_h.to(tl.int64) * stride_dy_h
        v_rows = v_ptr + batch * stride_v_b + start * stride_v_t + pid_h.to(tl.int64) * stride_v_h
        u_rows = u_ptr + row * CHUNK * nvalues
        w_rows = W_ptr + row * CHUNK * nvalues
        entering = entering_ptr + row * nvalues * nkeys
        leaving = leaving_ptr + row * nvalues * nkeys
        token = (batch * seqlen + start + offs_t) * nheads + pid_h
        r_at = k_at
        r_factor = k_factor
        if r_ptr is not None:
            r_at = r_ptr + batch * stride_r_b + start * stride_r_t + pid_h.to(tl.int64) * stride_r_h
            r_at += offs_t[:, None] * stride_r_t + offs_n[None, :]
            r_factor = tl.full((CHUNK,), 1.0, tl.float32)

        _, _, read, B, dbeta, part, A, turned, kept = _of_values(
            dy_rows, stride_dy_t, v_rows, stride_v_t, u_rows, w_rows, entering, leaving, inside, inside, mask_n, offs_n,
            nkeys, nvalues, False, True, True, ERASE, BLOCK_P, BLOCKS_P, PRECISION, CAREFUL,
        )  # fmt: skip

        # What is between a token and the state before the chunk, or the one after it.
        part *= exp2(to_end)[:, None]
        dk += part
        k = _load(k_at, mask_tn, CAREFUL)
        before = k_factor * tl.sum(part * k.to(tl.float32), axis=1)
        after = beta * 0.0
        if ERASE:
            read *= -exp2(c)[:, None]
            r = _load(r_at, mask_tn, CAREFUL)
            after = r_factor * tl.sum(read * r.to(tl.float32), axis=1)
            dbeta += after
            after *= beta
            read *= beta[:, None]
            if r_ptr is None:
                dk += read

        # What is between two tokens of the chunk. [i, j] is of a later token i, or turned, of a later token j.
        later = offs_t[:, None] > offs_t[None, :]
        pairs = tl.zeros((CHUNK, CHUNK), tl.float32)
        grown = exp2(tl.where(later, 0.0, -between))
        A = tl.where(later, 0.0, A * grown)
        dk = dot((A * q_factor[None, :]).to(dtype), _load(q_at, mask_tn, CAREFUL), dk, PRECISION)
        if ERASE:
            turned = tl.where(offs_t[:, None] < offs_t[None, :], -turned * grown, 0.0) * beta[None, :]
            B = tl.where(later, -B * exp2(tl.where(later, between, 0.0)), 0.0)
            pairs = dot(r, tl.trans(k), None, PRECISION) * r_factor[:, None] * k_factor[None, :]
            pairs = tl.where(later, B * pairs, 0.0)
            dbeta += tl.sum(pairs, axis=1)
            pairs *= beta[:, None]
            B *= beta[:, None]
            if r_ptr is not None:
                dr = dot((B * k_factor[None, :]).to(dtype), k, read, PRECISION)
                dk = dot(turned.to(dtype), r, dk, PRECISION)
            else:
                dk = dot(((B + turned) * k_factor[None, :]).to(dtype), k, dk, PRECISION)
        dg = beta * 0.0
        if dg_ptr is not None:
            dg = _straddling(pairs, after, before, dtype, PRECISION) + tl.load(dgq_ptr + token, mask=inside, other=0.0)
            dg += tl.sum(kept, axis=0) * tl.load(rows_ptr + row * (4 * CHUNK) + 3 * CHUNK)
        if CAREFUL:
            bad_k = _bad(tl.load(k_at, mask=mask_tn, other=0.0) * tl.load(more + 2 * CHUNK + offs_t)[:, None])
            bad_q = _bad(tl.load(q_at, mask=mask_tn, other=0.0) * tl.load(more + CHUNK + offs_t)[:, None])
            bad_r = bad_k
            if r_ptr is not None:
                bad_r = _bad(tl.load(r_at, mask=mask_tn, other=0.0))
            bad_g = tl.zeros((CHUNK, 1), tl.int32)
            if g_ptr is not None:
                g_rows = g_ptr + batch * stride_g_b + (start + offs_t) * stride_g_t + pid_h.to(tl.int64) * stride_g_h
                one = tl.arange(0, 1)
                bad_g = _bad_decays(g_rows, A_ptr, bias_ptr, pid_h, inside, one, one == 0, stride_g_n, stride_bias_h,
                                    stride_bias_n, lower, GATE)  # fmt: skip
            _, bad_k, bad_r, bad_g, bad_beta = _spoiled(
                bad_q, bad_k, bad_r, bad_g, _bad(tl.load(more + offs_t)),
                _bad_rows(dy_rows, stride_dy_t, inside, nvalues, BLOCK_P, BLOCKS_P),
                _bad_rows(v_rows, stride_v_t, inside, nvalues, BLOCK_P, BLOCKS_P),
                _bad_rows(u_rows, nvalues, inside, nvalues, BLOCK_P, BLOCKS_P),
                _bad_rows(w_rows, nvalues, inside, nvalues, BLOCK_P, BLOCKS_P),
                _bad_keys(entering, mask_n, offs_n, nkeys, nvalues, BLOCK_P, BLOCKS_P),
                _bad_keys(leaving, mask_n, offs_n, nkeys, nvalues, BLOCK_P, BLOCKS_P),
            )  # fmt: skip
            dk = _where_spoiled(dk, bad_k if r_ptr is not None else bad_k + bad_r)
            dg = _where_spoiled(dg, tl.sum(bad_g, axis=1))
            dbeta = _where_spoiled(dbeta, bad_beta)
            if r_ptr is not None:
                dr = _where_spoiled(dr, bad_r)
        if r_ptr is not None:
            tl.store(dr_ptr + token[:, None] * nkeys + offs_n[None, :], dr.to(dr_ptr.dtype.element_ty), mask=mask_tn)
        if dg_ptr is not None:
            tl.store(dg_ptr + token, dg, mask=inside)
        if dbeta_ptr is not None:
            tl.store(dbeta_ptr + token, dbeta, mask=inside)
    if (not CAREFUL) and (flags_ptr is not None):
        bad = tl.max(tl.max(_bad(dk), axis=1), axis=0)
        tl.store(flags_ptr + flag, tl.maximum(bad, tl.load(flags_ptr + flag)))
    k = tl.load(k_at, mask=mask_tn, other=0.0)
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
def _delta_bwd_pairs_kernel(
    q_ptr, r_ptr, k_ptr, v_ptr, g_ptr, A_ptr, bias_ptr, dy_ptr, P_ptr, rows_ptr, more_ptr, entering_ptr, leaving_ptr,
    u_ptr, W_ptr, cu_seqlens_ptr, flags_ptr, dq_ptr, dgq_ptr, dk_ptr, dr_ptr, dg_ptr, dbeta_ptr,
    seqlen, nchunks, nseqs, nheads, ngroups, nkeys, nvalues, scale, lower,
    stride_q_b, stride_q_t, stride_q_g, stride_r_b, stride_r_t, stride_r_h, stride_k_b, stride_k_t, stride_k_g,
    stride_v_b, stride_v_t, stride_v_h, stride_dy_b, stride_dy_t, stride_dy_h,
    stride_g_b, stride_g_t, stride_g_h, stride_g_n, stride_bias_h, stride_bias_n,
    CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCKS_P: tl.constexpr, NORMALIZE: tl.constexpr,
    ERASE: tl.constexpr, GATE: tl.constexpr, TWO: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
    CAREFUL: tl.constexpr,
):  # fmt: skip
    """Grid (slots, groups): a program goes twice over the heads of a group, for queries and for keys.

    Raises a flag where a gradient is not finite. CAREFUL: where the flag is up, writes all again, with NaN for what the
    definition spoils, and for no more.
    """
    slot = tl.program_id(0)
    pid_g = tl.program_id(1)
    batch, start, length = slot_span(cu_seqlens_ptr, slot, seqlen, nchunks, nseqs, CHUNK, VARLEN)
    flag = slot.to(tl.int64) * ngroups + pid_g
    nothing = length <= 0
    if CAREFUL:
        nothing = nothing | (tl.load(flags_ptr + flag) == 0)
    if nothing:
        return
    batch, start = batch.to(tl.int64), start.to(tl.int64)
    _queries(
        q_ptr, k_ptr, dy_ptr, P_ptr, more_ptr, entering_ptr, u_ptr, flags_ptr, dq_ptr, dgq_ptr,
        slot, pid_g, batch, start, length, flag, seqlen, nheads, ngroups, nkeys, nvalues, scale,
        stride_q_b, stride_q_t, stride_q_g, stride_k_b, stride_k_t, stride_k_g, stride_dy_b, stride_dy_t, stride_dy_h,
        CHUNK, BLOCK_N, BLOCK_P, BLOCKS_P, NORMALIZE, TWO, PRECISION, CAREFUL,
    )  # fmt: skip
    tl.debug_barrier()  # the second reads what the first wrote
    _keys(
        q_ptr, r_ptr, k_ptr, v_ptr, g_ptr, A_ptr, bias_ptr, dy_ptr, rows_ptr, more_ptr, entering_ptr, leaving_ptr,
        u_ptr, W_ptr, flags_ptr, dgq_ptr, dk_ptr, dr_ptr, dg_ptr, dbeta_ptr,
        slot, pid_g, batch, start, length, flag, seqlen, nheads, ngroups, nkeys, nvalues, lower,
        stride_q_b, stride_q_t, stride_q_g, stride_r_b, stride_r_t, stride_r_h, stride_k_b, stride_k_t, stride_k_g,
        stride_v_b, stride_v_t, stride_v_h, stride_dy_b, stride_dy_t, stride_dy_h,
        stride_g_b, stride_g_t, stride_g_h, stride_g_n, stride_bias_h, stride_bias_n,
        CHUNK, BLOCK_N, BLOCK_P, BLOCKS_P, NORMALIZE, ERASE, GATE, TWO, PRECISION, CAREFUL,
    )  # fmt: skip


@triton.jit
def _delta_bwd_keyed_kernel(
    q_ptr, r_ptr, k_ptr, v_ptr, g_ptr, A_ptr, bias_ptr, dy_ptr, c_ptr, more_ptr, entering_ptr, leaving_ptr, u_ptr,
    W_ptr, cu_seqlens_ptr, flags_ptr, dq_ptr, dk_ptr, dr_ptr, dgq_ptr, dg_ptr, dbeta_ptr,
    seqlen, nchunks, nseqs, nheads, ngroups, nkeys, nvalues, lower,
    stride_q_b, stride_q_t, stride_q_g, stride_r_b, stride_r_t, stride_r_h, stride_k_b, stride_k_t, stride_k_g,
    stride_v_b, stride_v_t, stride_v_h, stride_dy_b, stride_dy_t, stride_dy_h,
    stride_g_b, stride_g_t, stride_g_h, stride_g_n, stride_bias_h, stride_bias_n,
    CHUNK: tl.constexpr, LEVELS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCKS_P: tl.constexpr,
    LATER: tl.constexpr, ERASE: tl.constexpr, GATE: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
    CAREFUL: tl.constexpr,
):  # fmt: skip
    """Grid (slots, heads, slices of keys): a program writes gradients of BLOCK_N keys of a head.

    LATER, which runs first: those of what the later token of a pair has, q, r and beta, and their part of that of the
    log decays. Else those of k and of the log decays. Those of q and k are of one head, float32, and of keys of length
    one; that of beta is the share of the slice. Flags and CAREFUL as in `_delta_bwd_pairs_kernel`.
    """
    slot = tl.program_id(0)
    pid_h = tl.program_id(1)
    pid_n = tl.program_id(2)
    pid_g = pid_h // (nheads // ngroups)
    batch, start, length = slot_span(cu_seqlens_ptr, slot, seqlen, nchunks, nseqs, CHUNK, VARLEN)
    row = slot.to(tl.int64) * nheads + pid_h
    flag = row * tl.num_programs(2) + pid_n
    nothing = length <= 0
    if CAREFUL:
        nothing = nothing | (tl.load(flags_ptr + flag) == 0)
    if nothing:
        return
    batch, start = batch.to(tl.int64), start.to(tl.int64)
    offs_t = tl.arange(0, CHUNK)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = offs_t < length
    mask_n = offs_n < nkeys
    mask_tn = inside[:, None] & mask_n[None, :]
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    dy_rows = dy_ptr + batch * stride_dy_b + start * stride_dy_t + pid_h.to(tl.int64) * stride_dy_h
    v_rows = v_ptr + batch * stride_v_b + start * stride_v_t + pid_h.to(tl.int64) * stride_v_h
    u_rows = u_ptr + row * CHUNK * nvalues
    w_rows = W_ptr + row * CHUNK * nvalues
    entering = entering_ptr + row * nvalues * nkeys
    leaving = leaving_ptr + row * nvalues * nkeys
    more = more_ptr + row * (5 * CHUNK) + offs_t
    beta = _load(more, inside, CAREFUL)
    q_rows = q_ptr + batch * stride_q_b + start * stride_q_t + pid_g.to(tl.int64) * stride_q_g + offs_n[None, :]
    k_rows = k_ptr + batch * stride_k_b + start * stride_k_t + pid_g.to(tl.int64) * stride_k_g + offs_n[None, :]
    q_at = q_rows + offs_t[:, None] * stride_q_t
    k_at = k_rows + offs_t[:, None] * stride_k_t
    q_wide = _load(q_at, mask_tn, CAREFUL).to(tl.float32) * _load(more + CHUNK, inside, CAREFUL)[:, None]
    k_wide = _load(k_at, mask_tn, CAREFUL).to(tl.float32) * _load(more + 2 * CHUNK, inside, CAREFUL)[:, None]
    r_wide = k_wide
    if r_ptr is not None:
        r_rows = r_ptr + batch * stride_r_b + start * stride_r_t + pid_h.to(tl.int64) * stride_r_h + offs_n[None, :]
        r_at = r_rows + offs_t[:, None] * stride_r_t
        r_wide = _load(r_at, mask_tn, CAREFUL).to(tl.float32)
    c_rows = c_ptr + row * CHUNK * nkeys + offs_n[None, :]
    c = tl.load(c_rows + offs_t[:, None] * nkeys, mask=mask_n[None, :], other=0.0)
    token = (batch * seqlen + start + offs_t) * nheads + pid_h
    at = token[:, None] * nkeys + offs_n[None, :]
    reaches = offs_t[None, :] >= offs_t[:, None]
    if not LATER:
        reaches = offs_t[None, :] < offs_t[:, None]

    first = inside & ((offs_t * 0 + pid_n) == 0)  # the slice that counts what has no keys
    dy_state, dy_u, dr, B, dbeta, u_state, u_dy, u_w, kept = _of_values(
        dy_rows, stride_dy_t, v_rows, stride_v_t, u_rows, w_rows, entering, leaving, inside, first, mask_n, offs_n,
        nkeys, nvalues, LATER, LATER, not LATER, ERASE, BLOCK_P, BLOCKS_P, PRECISION, CAREFUL,
    )  # fmt: skip

    # What is between a token and the state before the chunk, or the one after it.
    r_beta = r_wide * beta[:, None]
    if LATER:
        since = exp2(c.to(tl.float32))
        grad = dy_state * since
        through = q_wide * grad
        if ERASE:
            dr *= -since
            through += r_beta * dr
        A = dy_u
        grad += diagonal(A)[:, None] * k_wide
    else:
        total = tl.load(c_ptr + (row * CHUNK + CHUNK - 1) * nkeys + offs_n, mask=mask_n, other=0.0)
        grad = u_state * exp2((total[None, :] - c).to(tl.float32))
        through = k_wide * grad
        A = u_dy
        B = u_w
        grad += diagonal(A)[:, None] * q_wide
    apart = offs_t[:, None] ^ offs_t[None, :]  # below 2^i where two tokens are in one block of so many
    triangle = offs_t[:, None] > offs_t[None, :] if LATER else offs_t[:, None] < offs_t[None, :]
    ones = tl.full((CHUNK, CHUNK), 1.0, dtype)  # made of A, they stay in its registers, and sums were wrong (H200)
    A = tl.where(triangle, A, 0.0).to(dtype)
    B = tl.where(triangle, -B, 0.0).to(dtype)
    dg = _sums_over(tl.where(reaches, ones, 0.0).to(dtype), through, None, PRECISION)

    # What is between two tokens of the chunk, level by level.
    level_0 = slot * 0
    if dtype == tl.bfloat16:
        # As in `prepare_keyed`, 16 tokens have one reference. Of the pairs around a token, two sums over later tokens
        # are the difference: of the same products, so that no rounding but those of float32 is left of it.
        between = c - tl.load(c_rows + ((offs_t >> 4 << 4) + 8)[:, None] * nkeys, mask=mask_n[None, :], other=0.0)
        if tl.max(tl.max(tl.abs(between), axis=1), axis=0) < NEAR:
            grown = exp2(between)
            q_grown = (q_wide * grown).to(dtype)
            k_grown = (k_wide * exp2(-between)).to(dtype)
            near = apart < 16
            part = dot(tl.where(near, A, 0.0).to(dtype), k_grown if LATER else q_grown, None, PRECISION)
            if LATER:
                grad += part * grown
                through = part * q_grown.to(tl.float32)
                if ERASE:
                    part = dot(tl.where(near, B, 0.0).to(dtype), k_grown, None, PRECISION)
                    dr += part * grown
                    through += part * (r_beta * grown).to(dtype).to(tl.float32)
            else:
                if ERASE:
                    part = dot(tl.where(near, B, 0.0).to(dtype), (r_beta * grown).to(dtype), part, PRECISION)
                grad += part * exp2(-between)
                through = part * -k_grown.to(tl.float32)
            sums = tl.where(near & (offs_t[None, :] >= offs_t[:, None]), ones, 0.0).to(dtype)
            dg = _sums_over(sums, through, dg, PRECISION)
            level_0 += 4
    for level in range(level_0, LEVELS):
        half = offs_t >> level
        later = half % 2 == 1
        reference = ((half >> 1) * 2 + 1) << level
        between = c - tl.load(c_rows + reference[:, None] * nkeys, mask=mask_n[None, :], other=0.0)
        shrunk = exp2(tl.where(later[:, None], between, -between).to(tl.float32))
        of_later = tl.where(later[:, None], shrunk, 0.0)
        of_earlier = tl.where(later[:, None], 0.0, shrunk)
        pairs = apart < (2 << level)
        if LATER:
            shrunk_k = (k_wide * of_earlier).to(dtype)
            part = dot(tl.where(pairs, A, 0.0).to(dtype), shrunk_k, None, PRECISION) * of_later
            grad += part
            through = q_wide * part
            if ERASE:
                part = dot(tl.where(pairs, B, 0.0).to(dtype), shrunk_k, None, PRECISION) * of_later
                dr += part
                through += r_beta * part
        else:
            part = dot(tl.where(pairs, A, 0.0).to(dtype), (q_wide * of_later).to(dtype), None, PRECISION)
            if ERASE:
                part = dot(tl.where(pairs, B, 0.0).to(dtype), (r_beta * of_later).to(dtype), part, PRECISION)
            part *= of_earlier
            grad += part
            through = k_wide * part
        sums = tl.where(reaches & (apart < (1 << level)), ones, 0.0).to(dtype)
        dg = _sums_over(sums, through, dg, PRECISION)
    if CAREFUL:
        bad_k = _bad(tl.load(k_at, mask=mask_tn, other=0.0) * tl.load(more + 2 * CHUNK)[:, None])
        bad_q = _bad(tl.load(q_at, mask=mask_tn, other=0.0) * tl.load(more + CHUNK)[:, None])
        bad_r = bad_k
        if r_ptr is not None:
            bad_r = _bad(tl.load(r_at, mask=mask_tn, other=0.0))
        g_rows = g_ptr + batch * stride_g_b + (start + offs_t) * stride_g_t + pid_h.to(tl.int64) * stride_g_h
        bad_g = _bad_decays(g_rows, A_ptr, bias_ptr, pid_h, inside, offs_n, mask_n, stride_g_n, stride_bias_h,
                            stride_bias_n, lower, GATE)  # fmt: skip
        bad_q, bad_k, bad_r, bad_g, bad_beta = _spoiled(
            bad_q, bad_k, bad_r, bad_g, _bad(tl.load(more)),
            _bad_rows(dy_rows, stride_dy_t, inside, nvalues, BLOCK_P, BLOCKS_P),
            _bad_rows(v_rows, stride_v_t, inside, nvalues, BLOCK_P, BLOCKS_P),
            _bad_rows(u_rows, nvalues, inside, nvalues, BLOCK_P, BLOCKS_P),
            _bad_rows(w_rows, nvalues, inside, nvalues, BLOCK_P, BLOCKS_P),
            _bad_keys(entering, mask_n, offs_n, nkeys, nvalues, BLOCK_P, BLOCKS_P),
            _bad_keys(leaving, mask_n, offs_n, nkeys, nvalues, BLOCK_P, BLOCKS_P),
        )  # fmt: skip
    bad = _bad(grad)
    if LATER:
        if ERASE:
            dbeta += tl.sum(r_wide * dr, axis=1)
            dr *= beta[:, None]
            bad = tl.maximum(bad, _bad(dr))
        if CAREFUL:
            grad = _where_spoiled(grad, bad_q)
            dr = _where_spoiled(dr, bad_r)
            dbeta = _where_spoiled(dbeta, bad_beta)
        if ERASE:
            tl.store(dr_ptr + at, dr.to(dr_ptr.dtype.element_ty), mask=mask_tn)
        tl.store(dq_ptr + at, grad, mask=mask_tn)
        tl.store(dgq_ptr + at, dg, mask=mask_tn)
        if dbeta_ptr is not None:
            tl.store(dbeta_ptr + token * tl.num_programs(2) + pid_n, dbeta, mask=inside)
    else:
        dg += (kept * exp2(total.to(tl.float32)))[None, :] + tl.load(dgq_ptr + at, mask=mask_tn, other=0.0)
        if CAREFUL:
            grad = _where_spoiled(grad, bad_k)
            dg = _where_spoiled(dg, bad_g)
        if ERASE and (r_ptr is None):
            grad += tl.load(dr_ptr + at, mask=mask_tn, other=0.0)
        tl.store(dk_ptr + at, grad, mask=mask_tn)
        tl.store(dg_ptr + at, dg, mask=mask_tn)
    if (not CAREFUL) and (flags_ptr is not None):
        raised = tl.max(tl.max(bad, axis=1), axis=0)
        if not LATER:
            raised = tl.maximum(raised, tl.load(flags_ptr + flag))
        tl.store(flags_ptr + flag, raised)


@triton.jit
def _delta_bwd_finish_kernel(
    part_ptr, x_ptr, dx_ptr, flags_ptr, tokens, seqlen, nheads, ngroups, nkeys, scale, stride_x_b, stride_x_t,
    stride_x_g,
    CHUNK: tl.constexpr, SLICES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of tokens, groups): a program adds up the gradients of the heads of a group.

    With flags, (slots, heads, SLICES), it does so where a flag is up.
    """
    pid_g = tl.program_id(1)
    heads = nheads // ngroups
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_n = tl.arange(0, BLOCK_N)
    inside = token < tokens
    if flags_ptr is not None:
        slot = token // seqlen * tl.cdiv(seqlen, CHUNK) + token % seqlen // CHUNK
        inside = tl.load(flags_ptr + (slot * nheads + pid_g * heads) * SLICES, mask=inside, other=0) > 0
        if tl.max(inside.to(tl.int32), axis=0) == 0:
            return
    mask = inside[:, None] & (offs_n < nkeys)[None, :]
    total = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for i in range(heads):
        at = (token[:, None] * nheads + pid_g * heads + i) * nkeys + offs_n[None, :]
        total += tl.load(part_ptr + at, mask=mask, other=0.0)
    x_rows = x_ptr + token // seqlen * stride_x_b + token % seqlen * stride_x_t + pid_g.to(tl.int64) * stride_x_g
    x = tl.load(x_rows[:, None] + offs_n[None, :], mask=mask, other=0.0)
    first = tl.program_id(0).to(tl.int64) * BLOCK_T
    _store_gradient(dx_ptr, total * scale, x, first, pid_g, ngroups, nkeys, inside, NORMALIZE)


@triton.jit
def _delta_bwd_gates_kernel(
    g_ptr, A_ptr, bias_ptr, beta_ptr, dlog_ptr, dstrength_ptr, dg_ptr, dbeta_ptr, dA_ptr, dbias_ptr,
    tokens, seqlen, nheads, nkeys, lower, beta_limit, stride_g_b, stride_g_t, stride_g_h, stride_g_n,
    stride_bias_h, stride_bias_n, stride_beta_b, stride_beta_t, stride_beta_h,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, SLICES: tl.constexpr, GATE: tl.constexpr, BETA: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of tokens, heads): a program writes gradients of gates from those of log decays, and of strengths.

    ``dlog`` is (tokens, heads, keys or 1), ``dstrength`` (tokens, heads, SLICES), of which the sum is meant. Of the
    gradients of A_log and dt_bias, it writes the sums over its tokens.
    """
    block = tl.program_id(0).to(tl.int64)
    pid_h = tl.program_id(1)
    token = block * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = token < tokens
    row, time, head = token // seqlen, token % seqlen, pid_h.to(tl.int64)
    cell = token * nheads + pid_h
    if g_ptr is not None:
        offs_n = tl.arange(0, BLOCK_N)
        mask_n = offs_n < nkeys
        mask = inside[:, None] & mask_n[None, :]
        rows = g_ptr + row * stride_g_b + time * stride_g_t + head * stride_g_h
        g, A, bias = load_gates(rows, A_ptr, bias_ptr, pid_h, inside, offs_n, mask_n, stride_g_n, stride_bias_h,
                                 stride_bias_n)  # fmt: skip
        g += bias
        at = cell[:, None] * nkeys + offs_n[None, :]
        dg = tl.load(dlog_ptr + at, mask=mask, other=0.0)
        rate = tl.exp(A)
        drate = dg
        if GATE == "softplus":
            drate = -dg * softplus(g)
            dg *= -rate * share(g)
        elif GATE == "bounded":
            of_limit = share(g)
            dg *= lower * (of_limit * (1.0 - of_limit))
        elif GATE == "bounded_A":
            of_limit = share(rate * g)
            dg *= lower * (of_limit * (1.0 - of_limit))
            drate = dg * g
            dg *= rate
        tl.store(dg_ptr + at, dg.to(dg_ptr.dtype.element_ty), mask=mask)
        if dbias_ptr is not None:
            sums = tl.sum(tl.where(mask, dg, 0.0), axis=0)
            tl.store(dbias_ptr + (block * nheads + pid_h) * nkeys + offs_n, sums, mask=mask_n)
        if dA_ptr is not None:
            tl.store(dA_ptr + block * nheads + pid_h, tl.sum(tl.sum(tl.where(mask, drate * rate, 0.0), axis=1), axis=0))
    if beta_ptr is not None:
        dbeta = tl.zeros((BLOCK_T,), tl.float32)
        for i in tl.static_range(SLICES):
            dbeta += tl.load(dstrength_ptr + cell * SLICES + i, mask=inside, other=0.0)
        if BETA == "sigmoid":
            beta_at = beta_ptr + row * stride_beta_b + time * stride_beta_t + head * stride_beta_h
            of_limit = share(tl.load(beta_at, mask=inside, other=0.0).to(tl.float32))
            dbeta *= beta_limit * (of_limit * (1.0 - of_limit))
        tl.store(dbeta_ptr + cell, dbeta.to(dbeta_ptr.dtype.element_ty), mask=inside)
