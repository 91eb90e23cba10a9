"""The Triton kernels of the SSD backward pass, for what `_triton_kernels` takes, cut into the same chunks.

After `chunks` and `prepare` of the forward pass come three launches, the first two once a block of heads, so that
states take bounded memory:

1. states    per head, in both directions of time: the state that enters each chunk, and the gradient of the state that
             leaves it
2. gradients per chunk and group: walks over heads with dB, dC and d(C·Bᵀ) in registers; writes dx, dz and d(dt)
3. finish    sums dB and dC over splits of the heads; and dA, dD and d(dt_bias) over chunks

With c the running sum of log decays in a chunk, X = step * x, H the state that enters and Λ the gradient of the one
that leaves, a chunk computes (i and j positions, j <= i)

    M_ij = (C_i·B_j) exp(c_i - c_j)        G_ij = dy_i·x_j        d(C·Bᵀ)_ij = G_ij exp(c_i - c_j) step_j
    dX_j = Σ_i M_ij dy_i + exp(c_last - c_j) Λ B_j
    dB_j = Σ_i d(C·Bᵀ)_ij C_i + exp(c_last - c_j) Λᵀ X_j
    dC_i = Σ_j d(C·Bᵀ)_ij B_j + exp(c_i) Hᵀ dy_i

The log decay of token k multiplies whatever goes from before k to k or later. Its gradient is the sum of those parts,

    Σ_{j<k<=i} step_j M_ij G_ij + Σ_{i>=k} exp(c_i) dy_i·H C_i + Σ_{j<k} exp(c_last - c_j) X_j·Λ B_j + exp(c_last) <H, Λ>

the first by a product with a triangle of ones: a difference of sums of rows and columns would cancel where decays are
strong. In registers and below, matrices of pairs of tokens are transposed, (j, i).
"""

from __future__ import annotations

import triton
import triton.language as tl

from refold.ops.ssd._triton_kernels import LOG2E, _chunk_span, _dot, _exp2, _load_decay, _softplus


@triton.jit
def _sigmoid(v):
    return 1.0 / (1.0 + _exp2(v * -LOG2E))


@triton.jit
def _ssd_bwd_states_kernel(
    table_ptr, x_ptr, dy_ptr, z_ptr, B_ptr, C_ptr, decay_ptr, step_ptr, initial_ptr, dfinal_ptr,
    entering_ptr, leaving_ptr, dinitial_ptr,
    seqlen, nchunks, nheads, ngroups, headdim, dstate, first, count,
    stride_x_b, stride_x_t, stride_x_h, stride_dy_b, stride_dy_t, stride_dy_h, stride_z_b, stride_z_t, stride_z_h,
    stride_B_b, stride_B_t, stride_B_g, stride_C_b, stride_C_t, stride_C_g,
    CHUNK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, VARLEN: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (2 * blocks of channels * heads of the block, batch): a program walks one head in one direction of time.

    Forward it reads x and B and writes the state that enters each chunk; in reverse it reads dy, z and C and writes the
    gradient of the state that leaves each chunk. The state (channels, states) stays in float32 registers.
    """
    reverse = tl.program_id(0) % 2
    blocks_p = tl.cdiv(headdim, BLOCK_P)
    pid_p = tl.program_id(0) // 2 % blocks_p
    pid_r = tl.program_id(0) // 2 // blocks_p
    pid_b = tl.program_id(1).to(tl.int64)
    pid_g = pid_r // count
    pid_h = pid_g * (nheads // ngroups) + first + pid_r % count
    offs_t = tl.arange(0, CHUNK)
    offs_n = tl.arange(0, BLOCK_N)
    offs_p = pid_p * BLOCK_P + tl.arange(0, BLOCK_P)
    mask_n = offs_n < dstate
    mask_p = offs_p < headdim
    mask_pn = mask_p[:, None] & mask_n[None, :]
    offs_pn = offs_p[:, None] * dstate + offs_n[None, :]
    in_base = x_ptr + pid_b * stride_x_b + pid_h * stride_x_h
    key_base = B_ptr + pid_b * stride_B_b + pid_g * stride_B_g
    out_base = entering_ptr
    stride_in_t, stride_key_t, begin_flag, end_flag = stride_x_t, stride_B_t, 1, 2
    if reverse:
        in_base = dy_ptr + pid_b * stride_dy_b + pid_h * stride_dy_h
        key_base = C_ptr + pid_b * stride_C_b + pid_g * stride_C_g
        out_base = leaving_ptr
        stride_in_t, stride_key_t, begin_flag, end_flag = stride_dy_t, stride_C_t, 2, 1
    # Flags as tensors: the interpreter takes no scalar into a mask.
    forward_pn = mask_pn & ((offs_pn * 0 + reverse) == 0)
    reverse_pn = mask_pn & ((offs_pn * 0 + reverse) != 0)
    state = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    for i in tl.range(0, nchunks, num_stages=STAGES):
        chunk = i + reverse * (nchunks - 1 - 2 * i)
        start, length, seq, flags = _chunk_span(table_ptr, pid_b.to(tl.int32), chunk, nchunks, seqlen, CHUNK, VARLEN)
        inside = offs_t < length
        start = start.to(tl.int64)
        row = (pid_b * nchunks + chunk) * nheads + pid_h
        mask_tp = inside[:, None] & mask_p[None, :]
        tile = tl.load(in_base + start * stride_in_t + offs_t[:, None] * stride_in_t + offs_p[None, :],
                       mask=mask_tp, other=0.0)  # fmt: skip
        key = tl.load(key_base + start * stride_key_t + offs_t[:, None] * stride_key_t + offs_n[None, :],
                      mask=inside[:, None] & mask_n[None, :], other=0.0)  # fmt: skip
        step = tl.load(step_ptr + row * CHUNK + offs_t)
        from_start, to_end, whole, _last, _high, _low = _load_decay(decay_ptr, row, offs_t, CHUNK, PARTS)
        weight = tl.where((offs_t * 0 + reverse) != 0, from_start, to_end * step)
        begins = (flags & begin_flag) != 0
        begins_pn = ((offs_pn * 0 + flags) & begin_flag) != 0
        state = tl.where(begins, 0.0, state)
        seq_row = (seq.to(tl.int64) * nheads + pid_h) * headdim * dstate
        if initial_ptr is not None:
            state += tl.load(initial_ptr + seq_row + offs_pn, mask=forward_pn & begins_pn, other=0.0).to(tl.float32)
        if dfinal_ptr is not None:
            state += tl.load(dfinal_ptr + seq_row + offs_pn, mask=reverse_pn & begins_pn, other=0.0).to(tl.float32)
        place = ((pid_b * nchunks + chunk) * (ngroups * count) + pid_r) * headdim * dstate
        tl.store(out_base + place + offs_pn, state.to(entering_ptr.dtype.element_ty), mask=mask_pn)
        weighted = tile.to(tl.float32) * weight[:, None]
        if z_ptr is not None:
            z_rows = z_ptr + pid_b * stride_z_b + start * stride_z_t + pid_h * stride_z_h
            gated = mask_tp & ((offs_t * 0 + reverse) != 0)[:, None]
            z = tl.load(z_rows + offs_t[:, None] * stride_z_t + offs_p[None, :], mask=gated, other=0.0).to(tl.float32)
            weighted = tl.where(gated, weighted * z * _sigmoid(z), weighted)
        state = _dot(tl.trans(weighted.to(key.dtype)), key, state * whole, PRECISION)
        if dinitial_ptr is not None:
            ends_pn = ((offs_pn * 0 + flags) & end_flag) != 0
            tl.store(dinitial_ptr + seq_row + offs_pn, state, mask=reverse_pn & ends_pn)


@triton.jit
def _ssd_bwd_gradients_kernel(
    table_ptr, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, dy_ptr,
    decay_ptr, step_ptr, entering_ptr, leaving_ptr, dx_ptr, ddt_ptr, dz_ptr, dB_ptr, dC_ptr, sums_ptr,
    seqlen, nchunks, nheads, ngroups, headdim, dstate, first, count, split_heads, first_block_n, columns,
    dt_min, dt_max,
    stride_x_b, stride_x_t, stride_x_h, stride_dy_b, stride_dy_t, stride_dy_h, stride_z_b, stride_z_t, stride_z_h,
    stride_B_b, stride_B_t, stride_B_g, stride_C_b, stride_C_t, stride_C_g,
    stride_dt_b, stride_dt_t, stride_dt_h, stride_D_h, stride_D_p,
    CHUNK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCKS_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS_N: tl.constexpr,
    LEAD: tl.constexpr, D_CHANNELS: tl.constexpr, SOFTPLUS: tl.constexpr, VARLEN: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (batch * chunks, groups * splits, blocks of states): a program owns one chunk of some heads of one group.

    It sums dB and dC of its block of states over its heads (float32, onto what earlier blocks of heads have left).
    With LEAD, whose program owns the first block of states, it also writes dx, dz, d(dt) and, of its chunk, the parts
    of dA, d(dt_bias) and dD. Reads x, dy, z and both states of each head once.
    """
    pid_c = tl.program_id(0).to(tl.int64)
    nsplits = tl.num_programs(1) // ngroups
    pid_g = tl.program_id(1) // nsplits
    pid_s = tl.program_id(1) % nsplits
    pid_b = pid_c // nchunks
    chunk = (pid_c % nchunks).to(tl.int32)
    start, length, _, _ = _chunk_span(table_ptr, pid_b, chunk, nchunks, seqlen, CHUNK, VARLEN)
    start = start.to(tl.int64)
    offs_t = tl.arange(0, CHUNK)
    offs_n = (first_block_n + tl.program_id(2)) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = offs_t < length
    mask_n = offs_n < dstate
    mask_tn = inside[:, None] & mask_n[None, :]
    B_rows = B_ptr + pid_b * stride_B_b + start * stride_B_t + pid_g * stride_B_g + offs_t[:, None] * stride_B_t
    C_rows = C_ptr + pid_b * stride_C_b + start * stride_C_t + pid_g * stride_C_g + offs_t[:, None] * stride_C_t
    B_tile = tl.load(B_rows + offs_n[None, :], mask=mask_tn, other=0.0)
    C_tile = tl.load(C_rows + offs_n[None, :], mask=mask_tn, other=0.0)
    if BLOCKS_N == 1:
        cb = _dot(B_tile, tl.trans(C_tile), None, PRECISION)
    else:
        cb = tl.zeros((CHUNK, CHUNK), tl.float32)
        for n in range(BLOCKS_N):
            offs_m = n * BLOCK_N + tl.arange(0, BLOCK_N)
            mask_tm = inside[:, None] & (offs_m < dstate)[None, :]
            B_part = tl.load(B_rows + offs_m[None, :], mask=mask_tm, other=0.0)
            C_part = tl.load(C_rows + offs_m[None, :], mask=mask_tm, other=0.0)
            cb = _dot(B_part, tl.trans(C_part), cb, PRECISION)
    causal = offs_t[:, None] <= offs_t[None, :]  # (j, i)
    cb = tl.where(causal, cb, 0.0)
    since = tl.where(offs_t[:, None] >= offs_t[None, :], 1.0, 0.0).to(x_ptr.dtype.element_ty)  # (i, k)

    # What earlier blocks of heads have left in this split.
    part = (pid_s * tl.num_programs(0) + pid_c) * ngroups + pid_g
    offs_part = part * CHUNK * dstate + offs_t[:, None] * dstate + offs_n[None, :]
    onto = mask_tn & ((offs_t * 0 + first) > 0)[:, None]
    dB = tl.load(dB_ptr + offs_part, mask=onto, other=0.0)
    dC = tl.load(dC_ptr + offs_part, mask=onto, other=0.0)
    dcb = tl.zeros((CHUNK, CHUNK), tl.float32)

    last_head = tl.minimum((pid_s + 1) * split_heads, count)
    for r in tl.range(pid_s * split_heads, last_head, num_stages=STAGES):
        pid_h = pid_g * (nheads // ngroups) + first + r
        row = pid_c * nheads + pid_h
        step = tl.load(step_ptr + row * CHUNK + offs_t)
        from_start, to_end, whole, _last, decay, low = _load_decay(decay_ptr, row, offs_t, CHUNK, PARTS)
        x_rows = x_ptr + pid_b * stride_x_b + start * stride_x_t + pid_h * stride_x_h + offs_t[:, None] * stride_x_t
        dy_rows = (dy_ptr + pid_b * stride_dy_b + start * stride_dy_t + pid_h * stride_dy_h
                   + offs_t[:, None] * stride_dy_t)  # fmt: skip
        place = (pid_c * (ngroups * count) + pid_g * count + r) * headdim * dstate
        pairs = tl.zeros((CHUNK, CHUNK), tl.float32)
        for p in tl.static_range(BLOCKS_P):
            offs_p = p * BLOCK_P + tl.arange(0, BLOCK_P)
            mask_tp = inside[:, None] & (offs_p < headdim)[None, :]
            x_tile = tl.load(x_rows + offs_p[None, :], mask=mask_tp, other=0.0)
            dy_tile = tl.load(dy_rows + offs_p[None, :], mask=mask_tp, other=0.0)
            if z_ptr is not None:
                z_rows = z_ptr + pid_b * stride_z_b + start * stride_z_t + pid_h * stride_z_h
                z = tl.load(z_rows + offs_t[:, None] * stride_z_t + offs_p[None, :], mask=mask_tp, other=0.0)
                z = z.to(tl.float32)
                dy_tile = (dy_tile * z * _sigmoid(z)).to(x_tile.dtype)
            pairs = _dot(x_tile, tl.trans(dy_tile), pairs, PRECISION)  # (j, i)
        between = decay[None, :] - decay[:, None]
        if PARTS == 2:
            between += low[None, :] - low[:, None]
        grown = _exp2(tl.where(causal, between, 0.0))
        mix = cb * grown
        dcb += tl.where(causal, pairs * grown * step[:, None], 0.0)
        dlog = tl.zeros((CHUNK,), tl.float32)
        dstep = tl.zeros((CHUNK,), tl.float32)
        kept = tl.zeros((CHUNK,), tl.float32)
        reads = tl.zeros((CHUNK,), tl.float32)
        if LEAD:
            crossing = _dot((pairs * mix).to(x_ptr.dtype.element_ty), since, None, PRECISION)  # (j, k)
            before = offs_t[:, None] < offs_t[None, :]
            dlog += tl.sum(tl.where(before, crossing * step[:, None], 0.0), axis=0)
        mix_step = (mix * step[:, None]).to(x_ptr.dtype.element_ty)
        mix = mix.to(x_ptr.dtype.element_ty)

        dD = tl.zeros((), tl.float32)
        overlap = tl.zeros((), tl.float32)
        for p in tl.static_range(BLOCKS_P):
            offs_p = p * BLOCK_P + tl.arange(0, BLOCK_P)
            mask_p = offs_p < headdim
            mask_tp = inside[:, None] & mask_p[None, :]
            if BLOCKS_P > 1:
                x_tile = tl.load(x_rows + offs_p[None, :], mask=mask_tp, other=0.0)
            if BLOCKS_P > 1 or z_ptr is not None:
                dy_tile = tl.load(dy_rows + offs_p[None, :], mask=mask_tp, other=0.0)
            if z_ptr is not None:
                z_rows = z_ptr + pid_b * stride_z_b + start * stride_z_t + pid_h * stride_z_h
                z = tl.load(z_rows + offs_t[:, None] * stride_z_t + offs_p[None, :], mask=mask_tp, other=0.0)
                z = z.to(tl.float32)
                gate = _sigmoid(z)
                dout = dy_tile.to(tl.float32)
                dy_wide = dout * z * gate
                dy_tile = dy_wide.to(x_tile.dtype)
            else:
                dy_wide = dy_tile.to(tl.float32)
            states = offs_p[:, None] * dstate + offs_n[None, :]
            mask_pn = mask_p[:, None] & mask_n[None, :]
            H = tl.load(entering_ptr + place + states, mask=mask_pn, other=0.0)
            dH = tl.load(leaving_ptr + place + states, mask=mask_pn, other=0.0)
            x_wide = x_tile.to(tl.float32)
            dB = _dot((x_wide * (to_end * step)[:, None]).to(x_tile.dtype), dH, dB, PRECISION)
            dC = _dot((dy_wide * from_start[:, None]).to(x_tile.dtype), H, dC, PRECISION)
            if LEAD:
                if BLOCKS_N == 1:
                    dX = _dot(B_tile, tl.trans(dH), None, PRECISION)
                    y = _dot(C_tile, tl.trans(H), None, PRECISION)
                    overlap += tl.sum(tl.sum(H.to(tl.float32) * dH.to(tl.float32), axis=1), axis=0)
                else:
                    dX = tl.zeros((CHUNK, BLOCK_P), tl.float32)
                    y = tl.zeros((CHUNK, BLOCK_P), tl.float32)
                    for n in tl.static_range(BLOCKS_N):
                        offs_m = n * BLOCK_N + tl.arange(0, BLOCK_N)
                        mask_m = (offs_m < dstate)[None, :]
                        B_part = tl.load(B_rows + offs_m[None, :], mask=inside[:, None] & mask_m, other=0.0)
                        C_part = tl.load(C_rows + offs_m[None, :], mask=inside[:, None] & mask_m, other=0.0)
                        states_m = place + offs_p[:, None] * dstate + offs_m[None, :]
                        H_part = tl.load(entering_ptr + states_m, mask=mask_p[:, None] & mask_m, other=0.0)
                        dH_part = tl.load(leaving_ptr + states_m, mask=mask_p[:, None] & mask_m, other=0.0)
                        dX = _dot(B_part, tl.trans(dH_part), dX, PRECISION)
                        y = _dot(C_part, tl.trans(H_part), y, PRECISION)
                        both = H_part.to(tl.float32) * dH_part.to(tl.float32)
                        overlap += tl.sum(tl.sum(both, axis=1), axis=0)
                dX *= to_end[:, None]
                kept += tl.sum(dX * x_wide, axis=1)
                dX = _dot(mix, dy_tile, dX, PRECISION)
                dstep += tl.sum(dX * x_wide, axis=1)
                y *= from_start[:, None]
                reads += tl.sum(y * dy_wide, axis=1)
                dx = dX * step[:, None]
                out = ((pid_b * seqlen + start) * nheads + pid_h) * headdim
                offs_out = out + offs_t[:, None] * (nheads * headdim) + offs_p[None, :]
                if D_ptr is not None:
                    D = tl.load(D_ptr + pid_h * stride_D_h + offs_p * stride_D_p, mask=mask_p, other=0.0)
                    D = D.to(tl.float32)
                    dx += D[None, :] * dy_wide
                    dD_p = tl.sum(dy_wide * x_wide, axis=0)
                    if D_CHANNELS:
                        at = sums_ptr + pid_c * columns + 2 * nheads + pid_h * headdim
                        tl.store(at + offs_p, dD_p, mask=mask_p)
                    else:
                        dD += tl.sum(dD_p, axis=0)
                if z_ptr is not None:
                    y = _dot(tl.trans(mix_step), x_tile, y, PRECISION)
                    if D_ptr is not None:
                        y += D[None, :] * x_wide
                    dz = dout * y * gate * (1.0 + z * (1.0 - gate))
                    tl.store(dz_ptr + offs_out, dz.to(dz_ptr.dtype.element_ty), mask=mask_tp)
                tl.store(dx_ptr + offs_out, dx.to(dx_ptr.dtype.element_ty), mask=mask_tp)
        if LEAD:
            kept *= step
            dlog += tl.cumsum(reads, axis=0, reverse=True) + (tl.cumsum(kept, axis=0) - kept) + overlap * whole
            A = tl.load(A_ptr + pid_h).to(tl.float32)
            dstep += dlog * A
            raw = tl.load(dt_ptr + pid_b * stride_dt_b + (start + offs_t) * stride_dt_t + pid_h * stride_dt_h,
                          mask=inside, other=0.0).to(tl.float32)  # fmt: skip
            if dt_bias_ptr is not None:
                raw += tl.load(dt_bias_ptr + pid_h).to(tl.float32)
            unclipped = raw
            if SOFTPLUS:
                unclipped = _softplus(raw)
            dstep = tl.where((unclipped < dt_min) | (unclipped > dt_max), 0.0, dstep)
            if SOFTPLUS:
                dstep *= tl.where(raw > 20.0, 1.0, _sigmoid(raw))
            dstep = tl.where(inside, dstep, 0.0)
            tl.store(ddt_ptr + (pid_b * seqlen + start + offs_t) * nheads + pid_h,
                     dstep.to(ddt_ptr.dtype.element_ty), mask=inside)  # fmt: skip
            sums = sums_ptr + pid_c * columns + pid_h
            tl.store(sums, tl.sum(dlog * step, axis=0))
            tl.store(sums + nheads, tl.sum(dstep, axis=0))
            if D_ptr is not None and not D_CHANNELS:
                tl.store(sums + 2 * nheads, dD)

    dcb_part = dcb.to(x_ptr.dtype.element_ty)
    dB = _dot(dcb_part, C_tile, dB, PRECISION)
    dC = _dot(tl.trans(dcb_part), B_tile, dC, PRECISION)
    tl.store(dB_ptr + offs_part, dB, mask=mask_tn)
    tl.store(dC_ptr + offs_part, dC, mask=mask_tn)


@triton.jit
def _ssd_bwd_finish_kernel(
    table_ptr, dB_part_ptr, dC_part_ptr, sums_ptr, dB_ptr, dC_ptr, total_ptr,
    seqlen, nchunks, rows, ngroups, dstate, nsplits, columns,
    CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of sums + batch * chunks * groups): sums over all chunks first, as they take longest.

    A program sums BLOCK_S columns of what the chunks have left of dA, d(dt_bias) and dD, or dB and dC of one chunk and
    group over the splits of its heads; always in the same order.
    """
    blocks_s = tl.cdiv(columns, BLOCK_S)
    pid = tl.program_id(0)
    if pid < blocks_s:
        offs_s = pid * BLOCK_S + tl.arange(0, BLOCK_S)
        total = tl.zeros((BLOCK_R, BLOCK_S), tl.float32)
        for r in range(0, rows, BLOCK_R):
            offs_r = (r + tl.arange(0, BLOCK_R)).to(tl.int64)
            mask = (offs_r < rows)[:, None] & (offs_s < columns)[None, :]
            total += tl.load(sums_ptr + offs_r[:, None] * columns + offs_s[None, :], mask=mask, other=0.0)
        tl.store(total_ptr + offs_s, tl.sum(total, axis=0), mask=offs_s < columns)
    else:
        part = (pid - blocks_s).to(tl.int64)
        pid_g = part % ngroups
        pid_c = part // ngroups
        pid_b = pid_c // nchunks
        start, length, _, _ = _chunk_span(
            table_ptr, pid_b, (pid_c % nchunks).to(tl.int32), nchunks, seqlen, CHUNK, VARLEN
        )
        offs_t = tl.arange(0, CHUNK)
        out = ((pid_b * seqlen + start + offs_t) * ngroups + pid_g) * dstate
        for n in range(0, dstate, BLOCK_N):
            offs_n = n + tl.arange(0, BLOCK_N)
            mask = (offs_t < length)[:, None] & (offs_n < dstate)[None, :]
            offs = part * CHUNK * dstate + offs_t[:, None] * dstate + offs_n[None, :]
            dB = tl.zeros((CHUNK, BLOCK_N), tl.float32)
            dC = tl.zeros((CHUNK, BLOCK_N), tl.float32)
            for _s in range(nsplits):
                dB += tl.load(dB_part_ptr + offs, mask=mask, other=0.0)
                dC += tl.load(dC_part_ptr + offs, mask=mask, other=0.0)
                offs += (part * 0 + rows) * ngroups * CHUNK * dstate
            tl.store(dB_ptr + out[:, None] + offs_n[None, :], dB.to(dB_ptr.dtype.element_ty), mask=mask)
            tl.store(dC_ptr + out[:, None] + offs_n[None, :], dC.to(dC_ptr.dtype.element_ty), mask=mask)
