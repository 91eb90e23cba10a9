"""The Triton kernels of the SSD backward pass, for what `_triton_kernels` takes, cut into the same chunks.

These launches follow after `chunks` and `prepare` of the forward pass. The second and third run once per block of
heads, so that states take bounded memory:

1. gate     (with z only) dz, and dy before the gate, from the results of the forward pass without a gate
2. states   per head, in both directions of time: the state that enters each chunk, and the gradient of the state that
            leaves it
3. keys     per chunk and group: goes over heads with dB in registers; writes dx
   queries  the same with dC, and the part of the log decays' gradient that comes from outputs
   exact    both again for chunks in which they found a value that is not finite; others end at once
4. tokens   d(dt) of each token; sums dB and dC over splits of the heads
5. a sum of rows, for dA, dD and d(dt_bias)

With c the running sum of log decays in a chunk, X = step * x, H the state that enters and K the gradient of the one
that leaves, a chunk computes (i and j positions, j <= i)

    M_ij = (C_i·B_j) exp(c_i - c_j)        G_ij = dy_i·x_j        d(C·Bᵀ)_ij = G_ij exp(c_i - c_j) step_j
    dX_j = Σ_i M_ij dy_i + exp(c_last - c_j) K B_j
    dB_j = Σ_i d(C·Bᵀ)_ij C_i + exp(c_last - c_j) Kᵀ X_j
    dC_i = Σ_j d(C·Bᵀ)_ij B_j + exp(c_i) Hᵀ dy_i

The log decay of token k multiplies every term that goes from before k to k or later. Its gradient has four parts:

    Σ_{j<k<=i} step_j M_ij G_ij + Σ_{i>=k} exp(c_i) dy_i·H C_i + exp(c_last) <H, K>
    + Σ_{j<k} exp(c_last - c_j) X_j·K B_j

The first is computed by a product with a triangle of ones: a difference of sums of rows and columns would cancel where
decays are strong. `queries` writes the first three parts (late), `keys` the terms of the last (kept) and dX_j·x_j
(direct).
"""

from __future__ import annotations

import triton
import triton.language as tl

from refold.ops.ssd._triton_kernels import chunk_span, load_decay
from refold.ops.triton.math import LOG2E, clip, dot, exp2, is_finite, softplus

# Which heads a launch takes. Triton would compile a block of heads anew where 16 divides its numbers, for no gain.
UNSPECIALIZED = ("first", "count", "split_heads")


@triton.jit
def sigmoid(v):
    return 1.0 / (1.0 + exp2(v * -LOG2E))


@triton.jit
def _ssd_bwd_gate_kernel(
    dout_ptr, y_ptr, z_ptr, dz_ptr, seqlen, channels, headdim, stride_dout_b, stride_dout_t, stride_dout_h,
    stride_z_b, stride_z_t, stride_z_h, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, blocks of channels): y, the result before the gate, makes room for its gradient."""
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < channels
    pid_b, t, heads, p = token // seqlen, token % seqlen, offs // headdim, offs % headdim
    dout_row = dout_ptr + pid_b * stride_dout_b + t * stride_dout_t
    z_row = z_ptr + pid_b * stride_z_b + t * stride_z_t
    dout = tl.load(dout_row + heads * stride_dout_h + p, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(z_row + heads * stride_z_h + p, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + token * channels + offs, mask=mask, other=0.0).to(tl.float32)
    gate = sigmoid(z)
    dz = dout * y * gate * (1.0 + z * (1.0 - gate))
    tl.store(dz_ptr + token * channels + offs, dz.to(dz_ptr.dtype.element_ty), mask=mask)
    tl.store(y_ptr + token * channels + offs, (dout * z * gate).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _ssd_bwd_states_kernel(
    table_ptr, x_ptr, dy_ptr, B_ptr, C_ptr, decay_ptr, step_ptr, initial_ptr, dfinal_ptr,
    entering_ptr, leaving_ptr, dinitial_ptr,
    seqlen, nchunks, nheads, ngroups, headdim, dstate, first, count,
    stride_x_b, stride_x_t, stride_x_h, stride_dy_b, stride_dy_t, stride_dy_h,
    stride_B_b, stride_B_t, stride_B_g, stride_C_b, stride_C_t, stride_C_g,
    CHUNK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, VARLEN: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (2 * blocks of channels * heads of the block, batch): a program walks one head in one direction of time.

    Forward it reads x and B and writes the state that enters each chunk; in reverse it reads dy and C and writes the
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
        start, length, seq, flags = chunk_span(table_ptr, pid_b.to(tl.int32), chunk, nchunks, seqlen, CHUNK, VARLEN)
        inside = offs_t < length
        start = start.to(tl.int64)
        row = (pid_b * nchunks + chunk) * nheads + pid_h
        mask_tp = inside[:, None] & mask_p[None, :]
        tile = tl.load(in_base + start * stride_in_t + offs_t[:, None] * stride_in_t + offs_p[None, :],
                       mask=mask_tp, other=0.0)  # fmt: skip
        key = tl.load(key_base + start * stride_key_t + offs_t[:, None] * stride_key_t + offs_n[None, :],
                      mask=inside[:, None] & mask_n[None, :], other=0.0)  # fmt: skip
        step = tl.load(step_ptr + row * CHUNK + offs_t)
        from_start, to_end, whole, _last, _high, _low = load_decay(decay_ptr, row, offs_t, CHUNK, PARTS)
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
        weighted = (tile * weight[:, None]).to(key.dtype)
        state = dot(tl.trans(weighted), key, state * whole, PRECISION)
        if dinitial_ptr is not None:
            ends_pn = ((offs_pn * 0 + flags) & end_flag) != 0
            tl.store(dinitial_ptr + seq_row + offs_pn, state, mask=reverse_pn & ends_pn)


@triton.jit
def _pairs(
    left_rows, left_inside, right_rows, right_inside, size, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the products of rows of a chunk, of ``size`` elements each, (tokens of left, tokens of right)."""
    pairs = tl.zeros((left_inside.shape[0], right_inside.shape[0]), tl.float32)
    for block in range(BLOCKS):
        offs = block * BLOCK + tl.arange(0, BLOCK)
        mask = (offs < size)[None, :]
        left = tl.load(left_rows + offs[None, :], mask=left_inside[:, None] & mask, other=0.0)
        right = tl.load(right_rows + offs[None, :], mask=right_inside[:, None] & mask, other=0.0)
        pairs = dot(left, tl.trans(right), pairs, PRECISION)
    return pairs


@triton.jit
def _any_bad(values):
    """Return 1 if anything is not finite, else 0."""
    return tl.max(tl.max(tl.where(is_finite(values), 0, 1), axis=1), axis=0)


@triton.jit
def _exact_decay(A_ptr, pid_h, step):
    """Return, in float64, the running sum of log2 decays without those that are NaN or inf, and the number of these."""
    A = clip(tl.load(A_ptr + pid_h).to(tl.float32), -1e38, 1e38).to(tl.float64)
    log2_decay = step.to(tl.float64) * A * tl.full((1,), LOG2E, tl.float64)
    good = log2_decay < float("inf")
    decay = tl.cumsum(tl.where(good, clip(log2_decay, -256.0, 256.0), 0.0), axis=0)
    return decay, tl.cumsum(tl.where(good, 0, 1), axis=0)


@triton.jit
def _decayed(decay, since, bad):
    """Return 2 to the power of decay - since; NaN where one of the decays in between is bad."""
    return tl.where(bad, float("nan"), exp2((decay - since).to(tl.float32)))


@triton.jit
def _at(values, offs, offs_t):
    """Return the values of the tokens ``offs`` of those of ``offs_t``."""
    return tl.sum(tl.where(offs[:, None] == offs_t[None, :], values[None, :], 0), axis=1)


@triton.jit
def _flag_at(flags_ptr, pid_c, first_block_n):
    """Return where a program says whether dB, then dC, has values that are not finite."""
    block = (pid_c * 0 + first_block_n + tl.program_id(2)) * tl.num_programs(0) + pid_c
    return flags_ptr + 2 * (block * tl.num_programs(1) + tl.program_id(1))


@triton.jit
def _keys(
    table_ptr, x_ptr, dy_ptr, A_ptr, B_ptr, C_ptr, D_ptr, decay_ptr, step_ptr, leaving_ptr,
    dx_ptr, dB_ptr, kept_ptr, direct_ptr, skip_ptr, sums_ptr, flags_ptr,
    seqlen, nchunks, nheads, ngroups, headdim, dstate, first, count, split_heads, first_block_n, columns, first_row,
    stride_x_b, stride_x_t, stride_x_h, stride_dy_b, stride_dy_t, stride_dy_h,
    stride_B_b, stride_B_t, stride_B_g, stride_C_b, stride_C_t, stride_C_g, stride_D_h, stride_D_p,
    CHUNK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCKS_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS_N: tl.constexpr,
    LEAD: tl.constexpr, D_CHANNELS: tl.constexpr, VARLEN: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Do what `_ssd_bwd_keys_kernel` does, or `_ssd_bwd_exact_kernel`, for ROWS tokens j from ``first_row`` on."""
    pid_c = tl.program_id(0).to(tl.int64)
    nsplits = tl.num_programs(1) // ngroups
    pid_g = tl.program_id(1) // nsplits
    pid_s = tl.program_id(1) % nsplits
    pid_b = pid_c // nchunks
    chunk = (pid_c % nchunks).to(tl.int32)
    start, length, _seq, _flags = chunk_span(table_ptr, pid_b.to(tl.int32), chunk, nchunks, seqlen, CHUNK, VARLEN)
    start = start.to(tl.int64)
    offs_t = tl.arange(0, CHUNK)
    offs_j = first_row + tl.arange(0, ROWS)
    offs_n = (first_block_n + tl.program_id(2)) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = offs_t < length
    inside_j = offs_j < length
    mask_n = offs_n < dstate
    mask_jn = inside_j[:, None] & mask_n[None, :]
    B_rows = B_ptr + pid_b * stride_B_b + start * stride_B_t + pid_g * stride_B_g + offs_j[:, None] * stride_B_t
    C_rows = C_ptr + pid_b * stride_C_b + start * stride_C_t + pid_g * stride_C_g + offs_t[:, None] * stride_C_t
    causal = offs_j[:, None] <= offs_t[None, :]
    cb = _pairs(B_rows, inside_j, C_rows, inside, dstate, BLOCK_N, BLOCKS_N, PRECISION)
    cb = tl.where(causal, cb, 0.0)

    # What earlier blocks of heads have left in this split.
    part = (pid_s * tl.num_programs(0) + pid_c) * ngroups + pid_g
    offs_part = part * CHUNK * dstate + offs_j[:, None] * dstate + offs_n[None, :]
    onto = mask_jn & ((offs_j * 0 + first) > 0)[:, None]
    dB = tl.load(dB_ptr + offs_part, mask=onto, other=0.0)
    dcb = tl.zeros((ROWS, CHUNK), tl.float32)
    offs_c = tl.arange(0, BLOCK_P)
    last_head = tl.minimum((pid_s + 1) * split_heads, count)
    for r in tl.range(pid_s * split_heads, last_head, num_stages=STAGES):
        pid_h = pid_g * (nheads // ngroups) + first + r
        row = pid_c * nheads + pid_h
        step = tl.load(step_ptr + row * CHUNK + offs_j)
        _since, to_end, _whole, _last, decay, low = load_decay(decay_ptr, row, offs_j, CHUNK, PARTS)
        x_rows = x_ptr + pid_b * stride_x_b + start * stride_x_t + pid_h * stride_x_h + offs_j[:, None] * stride_x_t
        dy_rows = (dy_ptr + pid_b * stride_dy_b + start * stride_dy_t + pid_h * stride_dy_h
                   + offs_t[:, None] * stride_dy_t)  # fmt: skip
        place = (pid_c * (ngroups * count) + pid_g * count + r) * headdim * dstate
        if BLOCKS_P == 1:
            mask_c = (offs_c < headdim)[None, :]
            x_tile = tl.load(x_rows + offs_c[None, :], mask=inside_j[:, None] & mask_c, other=0.0)
            dy_tile = tl.load(dy_rows + offs_c[None, :], mask=inside[:, None] & mask_c, other=0.0)
            pairs = dot(x_tile, tl.trans(dy_tile), None, PRECISION)
        else:
            pairs = _pairs(x_rows, inside_j, dy_rows, inside, headdim, BLOCK_P, BLOCKS_P, PRECISION)
        if EXACT:
            sums, bad = _exact_decay(A_ptr, pid_h, tl.load(step_ptr + row * CHUNK + offs_t))
            sums_j, bad_j = _at(sums, offs_j, offs_t), _at(bad, offs_j, offs_t)
            grown = _decayed(sums[None, :], sums_j[:, None], bad[None, :] > bad_j[:, None])
            grown = tl.where(causal, grown, 0.0)
            to_end = _decayed(tl.sum(tl.where(offs_t == CHUNK - 1, sums, 0.0)), sums_j, bad_j < tl.max(bad))
        else:
            between = decay[None, :] - decay[:, None]
            if PARTS == 2:
                between += low[None, :] - low[:, None]
            grown = exp2(tl.where(causal, between, 0.0))
        dcb += pairs * grown * step[:, None]
        if LEAD:
            mix = (cb * grown).to(x_ptr.dtype.element_ty)
            kept = tl.zeros((ROWS,), tl.float32)
            direct = tl.zeros((ROWS,), tl.float32)
            skip = tl.zeros((ROWS,), tl.float32)
        for p in range(BLOCKS_P):  # of one trip: inlined
            offs_p = p * BLOCK_P + offs_c
            mask_p = offs_p < headdim
            mask_jp = inside_j[:, None] & mask_p[None, :]
            if BLOCKS_P > 1:
                x_tile = tl.load(x_rows + offs_p[None, :], mask=mask_jp, other=0.0)
                if LEAD:
                    dy_tile = tl.load(dy_rows + offs_p[None, :], mask=inside[:, None] & mask_p[None, :], other=0.0)
            offs_pn = offs_p[:, None] * dstate + offs_n[None, :]
            K = tl.load(leaving_ptr + place + offs_pn, mask=mask_p[:, None] & mask_n[None, :], other=0.0)
            dB = dot((x_tile * (to_end * step)[:, None]).to(x_tile.dtype), K, dB, PRECISION)
            if LEAD:
                B_tile = tl.load(B_rows + offs_n[None, :], mask=mask_jn, other=0.0)
                dX = dot(B_tile, tl.trans(K), None, PRECISION)
                for n in range(1, BLOCKS_N):
                    offs_m = n * BLOCK_N + tl.arange(0, BLOCK_N)
                    mask_m = (offs_m < dstate)[None, :]
                    offs_pm = offs_p[:, None] * dstate + offs_m[None, :]
                    B_part = tl.load(B_rows + offs_m[None, :], mask=inside_j[:, None] & mask_m, other=0.0)
                    K_part = tl.load(leaving_ptr + place + offs_pm, mask=mask_p[:, None] & mask_m, other=0.0)
                    dX = dot(B_part, tl.trans(K_part), dX, PRECISION)
                dX *= to_end[:, None]
                kept += tl.sum(dX * x_tile, axis=1)
                if EXACT:
                    finite = is_finite(dy_tile)
                    dX = dot(mix, tl.where(finite, dy_tile, 0.0).to(dy_tile.dtype), dX, PRECISION)
                    latest = tl.max(tl.where(finite, -1, offs_t[:, None]), axis=0)
                    dX = tl.where(offs_j[:, None] <= latest[None, :], float("nan"), dX)
                else:
                    dX = dot(mix, dy_tile, dX, PRECISION)
                direct += tl.sum(dX * x_tile, axis=1)
                dx = dX * step[:, None]
                if D_ptr is not None:
                    D = tl.load(D_ptr + pid_h * stride_D_h + offs_p * stride_D_p, mask=mask_p, other=0.0)
                    dy_own = dy_tile
                    if ROWS < CHUNK:
                        dy_own = (dy_ptr + pid_b * stride_dy_b + start * stride_dy_t + pid_h * stride_dy_h
                                  + offs_j[:, None] * stride_dy_t)  # fmt: skip
                        dy_own = tl.load(dy_own + offs_p[None, :], mask=mask_jp, other=0.0)
                    dx += D.to(tl.float32)[None, :] * dy_own
                    dyx = dy_own.to(tl.float32) * x_tile
                    if D_CHANNELS:
                        at = sums_ptr + pid_c * columns + 2 * nheads + pid_h * headdim + offs_p
                        dD = tl.sum(dyx, axis=0)
                        if ROWS < CHUNK:
                            dD += tl.load(at, mask=mask_p & (offs_p * 0 + first_row > 0), other=0.0)
                        tl.store(at, dD, mask=mask_p)
                    else:
                        skip += tl.sum(dyx, axis=1)
                out = ((pid_b * seqlen + start) * nheads + pid_h) * headdim
                offs_out = out + offs_j[:, None] * (nheads * headdim) + offs_p[None, :]
                tl.store(dx_ptr + offs_out, dx.to(dx_ptr.dtype.element_ty), mask=mask_jp)
        if LEAD:
            tl.store(kept_ptr + row * CHUNK + offs_j, kept * step)
            tl.store(direct_ptr + row * CHUNK + offs_j, direct)
            if D_ptr is not None and not D_CHANNELS:
                tl.store(skip_ptr + row * CHUNK + offs_j, skip)

    dcb = tl.where(causal, dcb, 0.0).to(x_ptr.dtype.element_ty)
    C_tile = tl.load(C_rows + offs_n[None, :], mask=inside[:, None] & mask_n[None, :], other=0.0)
    flag_at = _flag_at(flags_ptr, pid_c, first_block_n)
    if EXACT:
        finite = is_finite(C_tile)
        dB = dot(dcb, tl.where(finite, C_tile, 0.0).to(C_tile.dtype), dB, PRECISION)
        latest = tl.max(tl.where(finite, -1, offs_t[:, None]), axis=0)
        dB = tl.where(offs_j[:, None] <= latest[None, :], float("nan"), dB)
        kept_dB = tl.load(flag_at) == 0
    else:
        dB = dot(dcb, C_tile, dB, PRECISION)
        bad = tl.maximum(_any_bad(dB), _any_bad(cb))
        tl.store(flag_at, bad)
        kept_dB = bad != 0
    tl.store(dB_ptr + offs_part, dB, mask=mask_jn & ((offs_n * 0 + kept_dB.to(tl.int32)) == 0)[None, :])


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _ssd_bwd_keys_kernel(
    table_ptr, x_ptr, dy_ptr, B_ptr, C_ptr, D_ptr, decay_ptr, step_ptr, leaving_ptr,
    dx_ptr, dB_ptr, kept_ptr, direct_ptr, skip_ptr, sums_ptr, flags_ptr,
    seqlen, nchunks, nheads, ngroups, headdim, dstate, first, count, split_heads, first_block_n, columns,
    stride_x_b, stride_x_t, stride_x_h, stride_dy_b, stride_dy_t, stride_dy_h,
    stride_B_b, stride_B_t, stride_B_g, stride_C_b, stride_C_t, stride_C_g, stride_D_h, stride_D_p,
    CHUNK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCKS_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS_N: tl.constexpr,
    LEAD: tl.constexpr, D_CHANNELS: tl.constexpr, VARLEN: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (batch * chunks, groups * splits, blocks of states): a program owns one chunk of some heads of one group.

    It sums dB of its block of states over its heads (float32, onto what earlier blocks of heads have left). With LEAD,
    whose program owns the first block of states, it also writes dx, kept, direct and, where there is a D, dy·x of each
    token (skip) or its part of dD. Matrices of pairs of tokens are (j, i).
    """
    _keys(
        table_ptr, x_ptr, dy_ptr, None, B_ptr, C_ptr, D_ptr, decay_ptr, step_ptr, leaving_ptr,
        dx_ptr, dB_ptr, kept_ptr, direct_ptr, skip_ptr, sums_ptr, flags_ptr,
        seqlen, nchunks, nheads, ngroups, headdim, dstate, first, count, split_heads, first_block_n, columns, 0,
        stride_x_b, stride_x_t, stride_x_h, stride_dy_b, stride_dy_t, stride_dy_h,
        stride_B_b, stride_B_t, stride_B_g, stride_C_b, stride_C_t, stride_C_g, stride_D_h, stride_D_p,
        CHUNK, BLOCK_P, BLOCKS_P, BLOCK_N, BLOCKS_N, LEAD, D_CHANNELS, VARLEN, PARTS, PRECISION, STAGES, CHUNK, False,
    )  # fmt: skip


@triton.jit
def _queries(
    table_ptr, x_ptr, dy_ptr, A_ptr, B_ptr, C_ptr, decay_ptr, step_ptr, entering_ptr, leaving_ptr,
    dC_ptr, late_ptr, through_ptr, flags_ptr,
    seqlen, nchunks, nheads, ngroups, headdim, dstate, first, count, split_heads, first_block_n, first_row,
    stride_x_b, stride_x_t, stride_x_h, stride_dy_b, stride_dy_t, stride_dy_h,
    stride_B_b, stride_B_t, stride_B_g, stride_C_b, stride_C_t, stride_C_g,
    CHUNK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCKS_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS_N: tl.constexpr,
    LEAD: tl.constexpr, VARLEN: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    ROWS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Do what `_ssd_bwd_queries_kernel` does, or `_ssd_bwd_exact_kernel`, for ROWS tokens i from ``first_row`` on."""
    pid_c = tl.program_id(0).to(tl.int64)
    nsplits = tl.num_programs(1) // ngroups
    pid_g = tl.program_id(1) // nsplits
    pid_s = tl.program_id(1) % nsplits
    pid_b = pid_c // nchunks
    chunk = (pid_c % nchunks).to(tl.int32)
    start, length, _seq, _flags = chunk_span(table_ptr, pid_b.to(tl.int32), chunk, nchunks, seqlen, CHUNK, VARLEN)
    start = start.to(tl.int64)
    offs_t = tl.arange(0, CHUNK)
    offs_i = first_row + tl.arange(0, ROWS)
    offs_n = (first_block_n + tl.program_id(2)) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = offs_t < length
    inside_i = offs_i < length
    mask_n = offs_n < dstate
    mask_in = inside_i[:, None] & mask_n[None, :]
    B_rows = B_ptr + pid_b * stride_B_b + start * stride_B_t + pid_g * stride_B_g + offs_t[:, None] * stride_B_t
    C_rows = C_ptr + pid_b * stride_C_b + start * stride_C_t + pid_g * stride_C_g + offs_i[:, None] * stride_C_t
    causal = offs_i[:, None] >= offs_t[None, :]
    cb = _pairs(C_rows, inside_i, B_rows, inside, dstate, BLOCK_N, BLOCKS_N, PRECISION)
    cb = tl.where(causal, cb, 0.0)
    before = tl.where(offs_t[:, None] < offs_t[None, :], 1.0, 0.0).to(x_ptr.dtype.element_ty)  # (j, k)

    # What earlier blocks of heads have left in this split.
    part = (pid_s * tl.num_programs(0) + pid_c) * ngroups + pid_g
    offs_part = part * CHUNK * dstate + offs_i[:, None] * dstate + offs_n[None, :]
    onto = mask_in & ((offs_i * 0 + first) > 0)[:, None]
    dC = tl.load(dC_ptr + offs_part, mask=onto, other=0.0)
    dcb = tl.zeros((ROWS, CHUNK), tl.float32)
    offs_c = tl.arange(0, BLOCK_P)
    last_head = tl.minimum((pid_s + 1) * split_heads, count)
    for r in tl.range(pid_s * split_heads, last_head, num_stages=STAGES):
        pid_h = pid_g * (nheads // ngroups) + first + r
        row = pid_c * nheads + pid_h
        step = tl.load(step_ptr + row * CHUNK + offs_t)
        from_start, _to_end, whole, _last, decay, low = load_decay(decay_ptr, row, offs_i, CHUNK, PARTS)
        x_rows = x_ptr + pid_b * stride_x_b + start * stride_x_t + pid_h * stride_x_h + offs_t[:, None] * stride_x_t
        dy_rows = (dy_ptr + pid_b * stride_dy_b + start * stride_dy_t + pid_h * stride_dy_h
                   + offs_i[:, None] * stride_dy_t)  # fmt: skip
        place = (pid_c * (ngroups * count) + pid_g * count + r) * headdim * dstate
        if BLOCKS_P == 1:
            mask_c = (offs_c < headdim)[None, :]
            x_tile = tl.load(x_rows + offs_c[None, :], mask=inside[:, None] & mask_c, other=0.0)
            dy_tile = tl.load(dy_rows + offs_c[None, :], mask=inside_i[:, None] & mask_c, other=0.0)
            pairs = dot(dy_tile, tl.trans(x_tile), None, PRECISION)
        else:
            pairs = _pairs(dy_rows, inside_i, x_rows, inside, headdim, BLOCK_P, BLOCKS_P, PRECISION)
        if EXACT:
            sums, bad = _exact_decay(A_ptr, pid_h, step)
            sums_i, bad_i = _at(sums, offs_i, offs_t), _at(bad, offs_i, offs_t)
            grown = _decayed(sums_i[:, None], sums[None, :], bad_i[:, None] > bad[None, :])
            from_start = _decayed(sums_i, 0.0, bad_i > 0)
            pairs = tl.where(causal, pairs * grown * step[None, :], 0.0)
        else:
            between = decay[:, None] - decay[None, :]
            if PARTS == 2:
                between += low[:, None] - low[None, :]
            pairs *= exp2(tl.where(causal, between, 0.0)) * step[None, :]
        dcb += pairs
        if LEAD:
            reads = tl.zeros((ROWS,), tl.float32)
            through = tl.zeros((BLOCK_P,), tl.float32)
        for p in range(BLOCKS_P):  # of one trip: inlined
            offs_p = p * BLOCK_P + offs_c
            mask_p = offs_p < headdim
            if BLOCKS_P > 1:
                dy_tile = tl.load(dy_rows + offs_p[None, :], mask=inside_i[:, None] & mask_p[None, :], other=0.0)
            offs_pn = offs_p[:, None] * dstate + offs_n[None, :]
            H = tl.load(entering_ptr + place + offs_pn, mask=mask_p[:, None] & mask_n[None, :], other=0.0)
            dC = dot((dy_tile * from_start[:, None]).to(x_ptr.dtype.element_ty), H, dC, PRECISION)
            if LEAD:
                C_tile = tl.load(C_rows + offs_n[None, :], mask=mask_in, other=0.0)
                y = dot(C_tile, tl.trans(H), None, PRECISION)
                mask_pn = mask_p[:, None] & mask_n[None, :]
                K = tl.load(leaving_ptr + place + offs_pn, mask=mask_pn, other=0.0)
                through += tl.sum(H.to(tl.float32) * K.to(tl.float32), axis=1)
                for n in range(1, BLOCKS_N):
                    offs_m = n * BLOCK_N + tl.arange(0, BLOCK_N)
                    mask_m = (offs_m < dstate)[None, :]
                    offs_pm = offs_p[:, None] * dstate + offs_m[None, :]
                    C_part = tl.load(C_rows + offs_m[None, :], mask=inside_i[:, None] & mask_m, other=0.0)
                    H_part = tl.load(entering_ptr + place + offs_pm, mask=mask_p[:, None] & mask_m, other=0.0)
                    K_part = tl.load(leaving_ptr + place + offs_pm, mask=mask_p[:, None] & mask_m, other=0.0)
                    y = dot(C_part, tl.trans(H_part), y, PRECISION)
                    through += tl.sum(H_part.to(tl.float32) * K_part.to(tl.float32), axis=1)
                reads += tl.sum(y * dy_tile, axis=1)
        if LEAD:
            if EXACT or PARTS == 2:  # LLVM takes long for products of three parts with a matrix that it knows
                crossing = tl.cumsum(tl.where(causal, pairs * cb, 0.0), axis=1)
                crossing = tl.sum(tl.where(offs_i[:, None] > offs_t[None, :], crossing, 0.0), axis=0)  # of k - 1
                late = _at(crossing, offs_t - 1, offs_t)
                late += tl.sum(tl.where(causal, (reads * from_start)[:, None], 0.0), axis=0)
            else:
                crossing = dot((pairs * cb).to(x_ptr.dtype.element_ty), before, None, PRECISION)  # (i, k)
                late = tl.sum(tl.where(causal, crossing + (reads * from_start)[:, None], 0.0), axis=0)
            if EXACT:
                others = (offs_t * 0 + first_row) > 0
                late += tl.load(late_ptr + row * CHUNK + offs_t, mask=others, other=0.0)
                if through_ptr is not None:  # which the other kernel leaves apart
                    tl.store(through_ptr + row * 16 + tl.arange(0, 16), tl.zeros((16,), tl.float32))
            if first_row == 0:
                late += tl.sum(through, axis=0) * whole
            tl.store(late_ptr + row * CHUNK + offs_t, late)

    dcb = tl.where(causal, dcb, 0.0).to(x_ptr.dtype.element_ty)
    B_tile = tl.load(B_rows + offs_n[None, :], mask=inside[:, None] & mask_n[None, :], other=0.0)
    flag_at = _flag_at(flags_ptr, pid_c, first_block_n) + 1
    if EXACT:
        finite = is_finite(B_tile)
        dC = dot(dcb, tl.where(finite, B_tile, 0.0).to(B_tile.dtype), dC, PRECISION)
        earliest = tl.min(tl.where(finite, CHUNK, offs_t[:, None]), axis=0)
        dC = tl.where(offs_i[:, None] >= earliest[None, :], float("nan"), dC)
        kept_dC = tl.load(flag_at) == 0
    else:
        dC = dot(dcb, B_tile, dC, PRECISION)
        bad = tl.maximum(_any_bad(dC), _any_bad(cb))
        tl.store(flag_at, bad)
        kept_dC = bad != 0
    tl.store(dC_ptr + offs_part, dC, mask=mask_in & ((offs_n * 0 + kept_dC.to(tl.int32)) == 0)[None, :])


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _ssd_bwd_queries_kernel(
    table_ptr, x_ptr, dy_ptr, B_ptr, C_ptr, decay_ptr, step_ptr, entering_ptr, leaving_ptr,
    dC_ptr, late_ptr, flags_ptr,
    seqlen, nchunks, nheads, ngroups, headdim, dstate, first, count, split_heads, first_block_n,
    stride_x_b, stride_x_t, stride_x_h, stride_dy_b, stride_dy_t, stride_dy_h,
    stride_B_b, stride_B_t, stride_B_g, stride_C_b, stride_C_t, stride_C_g,
    CHUNK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCKS_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS_N: tl.constexpr,
    LEAD: tl.constexpr, VARLEN: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (batch * chunks, groups * splits, blocks of states): a program owns one chunk of some heads of one group.

    It sums dC of its block of states over its heads (float32, onto what earlier blocks of heads have left). With LEAD,
    whose program owns the first block of states, it also writes late. Matrices of pairs of tokens are (i, j).
    """
    _queries(
        table_ptr, x_ptr, dy_ptr, None, B_ptr, C_ptr, decay_ptr, step_ptr, entering_ptr, leaving_ptr,
        dC_ptr, late_ptr, None, flags_ptr,
        seqlen, nchunks, nheads, ngroups, headdim, dstate, first, count, split_heads, first_block_n, 0,
        stride_x_b, stride_x_t, stride_x_h, stride_dy_b, stride_dy_t, stride_dy_h,
        stride_B_b, stride_B_t, stride_B_g, stride_C_b, stride_C_t, stride_C_g,
        CHUNK, BLOCK_P, BLOCKS_P, BLOCK_N, BLOCKS_N, LEAD, VARLEN, PARTS, PRECISION, STAGES, CHUNK, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _ssd_bwd_exact_kernel(
    table_ptr, x_ptr, dy_ptr, A_ptr, B_ptr, C_ptr, D_ptr, decay_ptr, step_ptr, entering_ptr, leaving_ptr,
    dx_ptr, dB_ptr, dC_ptr, kept_ptr, direct_ptr, skip_ptr, late_ptr, through_ptr, sums_ptr, flags_ptr,
    seqlen, nchunks, nheads, ngroups, headdim, dstate, first, count, split_heads, first_block_n, columns,
    stride_x_b, stride_x_t, stride_x_h, stride_dy_b, stride_dy_t, stride_dy_h,
    stride_B_b, stride_B_t, stride_B_g, stride_C_b, stride_C_t, stride_C_g, stride_D_h, stride_D_p,
    CHUNK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCKS_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS_N: tl.constexpr,
    LEAD: tl.constexpr, D_CHANNELS: tl.constexpr, VARLEN: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Do again what `keys` and `queries` have done for the chunks in which they found what is not finite.

    The products of the other kernels sum over pairs of tokens with zeros where the second comes before the first, and
    zero times NaN is NaN. Here what is not finite is taken out of such products, and each gradient that depends on it
    is made NaN. States at the borders of chunks need no such care: whatever they sum is before or after them all.

    It takes 16 tokens at a time, which compile in half the time of 32. Products of 64 rows are asynchronous, and
    Triton 3.6 may fence what threads write for those after the barrier, not before it; tiles of the other kernels are
    copied ahead.
    """
    ROWS: tl.constexpr = min(CHUNK, 16)
    at = _flag_at(flags_ptr, tl.program_id(0).to(tl.int64), first_block_n)
    again = tl.load(at) + tl.load(at + 1) > 0
    for first_row in range(0, tl.where(again, CHUNK, 0), ROWS):
        tl.debug_barrier()  # What other threads have summed for the rows before is read.
        _keys(
            table_ptr, x_ptr, dy_ptr, A_ptr, B_ptr, C_ptr, D_ptr, decay_ptr, step_ptr, leaving_ptr,
            dx_ptr, dB_ptr, kept_ptr, direct_ptr, skip_ptr, sums_ptr, flags_ptr,
            seqlen, nchunks, nheads, ngroups, headdim, dstate, first, count, split_heads, first_block_n, columns,
            first_row, stride_x_b, stride_x_t, stride_x_h, stride_dy_b, stride_dy_t, stride_dy_h,
            stride_B_b, stride_B_t, stride_B_g, stride_C_b, stride_C_t, stride_C_g, stride_D_h, stride_D_p,
            CHUNK, BLOCK_P, BLOCKS_P, BLOCK_N, BLOCKS_N, LEAD, D_CHANNELS, VARLEN, PARTS, PRECISION, 1, ROWS, True,
        )  # fmt: skip
        _queries(
            table_ptr, x_ptr, dy_ptr, A_ptr, B_ptr, C_ptr, decay_ptr, step_ptr, entering_ptr, leaving_ptr,
            dC_ptr, late_ptr, through_ptr, flags_ptr,
            seqlen, nchunks, nheads, ngroups, headdim, dstate, first, count, split_heads, first_block_n, first_row,
            stride_x_b, stride_x_t, stride_x_h, stride_dy_b, stride_dy_t, stride_dy_h,
            stride_B_b, stride_B_t, stride_B_g, stride_C_b, stride_C_t, stride_C_g,
            CHUNK, BLOCK_P, BLOCKS_P, BLOCK_N, BLOCKS_N, LEAD, VARLEN, PARTS, PRECISION, 1, ROWS, True,
        )  # fmt: skip


@triton.jit
def _ssd_bwd_tokens_kernel(
    table_ptr, dt_ptr, A_ptr, dt_bias_ptr, step_ptr, late_ptr, kept_ptr, direct_ptr, skip_ptr, through_ptr,
    dB_part_ptr, dC_part_ptr, ddt_ptr, dB_ptr, dC_ptr, sums_ptr,
    seqlen, nchunks, nheads, ngroups, dstate, nsplits, columns, dt_min, dt_max,
    stride_dt_b, stride_dt_t, stride_dt_h,
    CHUNK: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, SOFTPLUS: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """Grid (batch * chunks, groups + head blocks): a program owns one chunk of one group, or of BLOCK_H heads.

    Group programs sum dB and dC over the splits of heads, always in the same order. Head programs write d(dt) and the
    chunk's part of dA, d(dt_bias) and, where there is a D for each head, dD.
    """
    pid_c = tl.program_id(0).to(tl.int64)
    pid_g = tl.program_id(1)
    pid_b = pid_c // nchunks
    chunk = (pid_c % nchunks).to(tl.int32)
    start, length, _seq, _flags = chunk_span(table_ptr, pid_b.to(tl.int32), chunk, nchunks, seqlen, CHUNK, VARLEN)
    offs_t = tl.arange(0, CHUNK)
    inside = offs_t < length
    tokens = pid_b * seqlen + start + offs_t
    if pid_g < ngroups:
        for n in range(0, dstate, BLOCK_N):
            offs_n = n + tl.arange(0, BLOCK_N)
            mask = inside[:, None] & (offs_n < dstate)[None, :]
            offs = (pid_c * ngroups + pid_g) * CHUNK * dstate + offs_t[:, None] * dstate + offs_n[None, :]
            dB = tl.zeros((CHUNK, BLOCK_N), tl.float32)
            dC = tl.zeros((CHUNK, BLOCK_N), tl.float32)
            for _split in range(nsplits):
                dB += tl.load(dB_part_ptr + offs, mask=mask, other=0.0)
                dC += tl.load(dC_part_ptr + offs, mask=mask, other=0.0)
                offs += (pid_c * 0 + tl.num_programs(0)) * ngroups * CHUNK * dstate
            out = (tokens * ngroups + pid_g)[:, None] * dstate + offs_n[None, :]
            tl.store(dB_ptr + out, dB.to(dB_ptr.dtype.element_ty), mask=mask)
            tl.store(dC_ptr + out, dC.to(dC_ptr.dtype.element_ty), mask=mask)
    else:
        offs_h = (pid_g - ngroups) * BLOCK_H + tl.arange(0, BLOCK_H)
        heads = offs_h < nheads
        rows = (pid_c * nheads + offs_h[:, None]) * CHUNK + offs_t[None, :]
        mask = heads[:, None] & inside[None, :]
        # Shifted by a token: a sum less its last term would lose what is small before a large one.
        kept = tl.load(kept_ptr + rows - 1, mask=mask & (offs_t > 0)[None, :], other=0.0)
        dlog = tl.load(late_ptr + rows, mask=mask, other=0.0) + tl.cumsum(kept, axis=1)
        if through_ptr is not None:  # what `late` lacks: the parts of exp(c_last) <H, K>
            parts = (pid_c * nheads + offs_h[:, None]) * 16 + tl.arange(0, 16)[None, :]
            dlog += tl.sum(tl.load(through_ptr + parts, mask=heads[:, None], other=0.0), axis=1)[:, None]
        A = clip(tl.load(A_ptr + offs_h, mask=heads, other=0.0).to(tl.float32), -1e38, 1e38)
        dstep = tl.load(direct_ptr + rows, mask=mask, other=0.0) + dlog * A[:, None]
        dt_rows = dt_ptr + pid_b * stride_dt_b + (start + offs_t).to(tl.int64)[None, :] * stride_dt_t
        raw = tl.load(dt_rows + offs_h[:, None] * stride_dt_h, mask=mask, other=0.0).to(tl.float32)
        if dt_bias_ptr is not None:
            raw += tl.load(dt_bias_ptr + offs_h, mask=heads, other=0.0).to(tl.float32)[:, None]
        unclipped = raw
        if SOFTPLUS:
            unclipped = softplus(raw)
        dstep = tl.where((unclipped < dt_min) | (unclipped > dt_max), 0.0, dstep)
        if SOFTPLUS:
            dstep *= tl.where(raw > 20.0, 1.0, sigmoid(raw))
        dstep = tl.where(mask, dstep, 0.0)
        tl.store(ddt_ptr + tokens[None, :] * nheads + offs_h[:, None], dstep.to(ddt_ptr.dtype.element_ty), mask=mask)
        step = tl.load(step_ptr + rows, mask=mask, other=0.0)
        sums = sums_ptr + pid_c * columns + offs_h
        tl.store(sums, tl.sum(dlog * step, axis=1), mask=heads)
        tl.store(sums + nheads, tl.sum(dstep, axis=1), mask=heads)
        if skip_ptr is not None:
            skip = tl.load(skip_ptr + rows, mask=mask, other=0.0)
            tl.store(sums + 2 * nheads, tl.sum(skip, axis=1), mask=heads)
