"""The Triton kernels of the SSD forward pass, for any dtype, head size, state size, length and pack of sequences.

The time axis is cut into chunks of CHUNK tokens (at most; a chunk never crosses the end of a sequence) and the chunks
into segments. There are up to five launches; short inputs need two:

1. chunks    (packed sequences only) lists the chunks: where each begins, its length, its sequence
2. prepare   per chunk: dt after bias, softplus and limits; its decay, summed in log2; C·Bᵀ once per group
3. state     per piece (a segment is one or more pieces), except in the last segment: the state from its own tokens
4. pass      chains these states over the pieces (with few pieces, `scan` does that for itself)
5. scan      per segment: goes over its chunks with the state in registers and writes y

Decays are kept as sums of log2(a) inside a chunk, so every decay is one exp2 of a difference. For 16-bit inputs the
sums are float32. For float32 inputs (PARTS = 2) they are summed in float64 and kept as two float32 parts, a row of high
parts before a row of low parts, because differences of float32 sums would lose small decays after large ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from refold.ops.triton.math import LOG2E, clip, dot, exp2, let_next_start, sequence, silu, softplus
from refold.ops.triton.slots import place, place_of_token, spread

FIRST = tl.constexpr(1)  # flag of a chunk: its sequence begins here
LAST = tl.constexpr(2)  # flag of a chunk: its sequence ends here


@triton.jit
def load_decay(decay_ptr, row, offs_t, CHUNK: tl.constexpr, PARTS: tl.constexpr):
    """Return from_start = decay since the chunk began, to_end = until it ends, total, and the sums in two parts."""
    rows = decay_ptr + row * (CHUNK * PARTS)
    high = tl.load(rows + offs_t)
    last = tl.load(rows + CHUNK - 1)
    if PARTS == 1:
        return exp2(high), exp2(last - high), exp2(last), last, high, high
    low = tl.load(rows + CHUNK + offs_t)
    last_low = tl.load(rows + 2 * CHUNK - 1)
    to_end = exp2((last - high) + (last_low - low))
    return exp2(high) * exp2(low), to_end, exp2(last) * exp2(last_low), last, high, low


@triton.jit
def load_steps(
    dt_rows, dt_bias_ptr, offs_h, heads, inside, stride_dt_t, stride_dt_h, dt_min, dt_max, SOFTPLUS: tl.constexpr
):
    """Return steps (heads, tokens from ``dt_rows`` on) after bias, softplus and limits; 0 for what is not inside."""
    offs_t = tl.arange(0, inside.shape[0])
    mask = heads[:, None] & inside[None, :]
    step = tl.load(dt_rows + offs_t[None, :] * stride_dt_t + offs_h[:, None] * stride_dt_h, mask=mask, other=0.0)
    step = step.to(tl.float32)
    if dt_bias_ptr is not None:
        step += tl.load(dt_bias_ptr + offs_h, mask=heads, other=0.0).to(tl.float32)[:, None]
    if SOFTPLUS:
        step = softplus(step)
    return tl.where(mask, clip(step, dt_min, dt_max), 0.0)


@triton.jit
def load_rates(A_ptr, offs_h, heads):
    """Return rates of heads; one of -inf must not make NaN of the tokens that fill a chunk, whose step is zero."""
    return clip(tl.load(A_ptr + offs_h, mask=heads, other=0.0).to(tl.float32), -1e38, 1e38)


@triton.jit
def log2_decays(step, A, WIDE: tl.constexpr):
    """Return log2 of decays, at least -256: that leaves nothing, and less would lose what sums add to it."""
    if WIDE:
        found = step.to(tl.float64) * A.to(tl.float64)[:, None] * tl.full((1, 1), LOG2E, tl.float64)
    else:
        found = step * (A * LOG2E)[:, None]
    return clip(found, -256.0, 256.0)  # one return: Triton reads what follows a return in an if, and wants its type


@triton.jit
def load_log2_decays(
    dt_rows, A_ptr, dt_bias_ptr, offs_h, heads, inside, stride_dt_t, stride_dt_h, dt_min, dt_max,
    SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """Return `log2_decays` of `load_steps`, float32."""
    step = load_steps(dt_rows, dt_bias_ptr, offs_h, heads, inside, stride_dt_t, stride_dt_h, dt_min, dt_max, SOFTPLUS)
    return log2_decays(step, load_rates(A_ptr, offs_h, heads), False)


@triton.jit
def chunk_span(table_ptr, pid_b, chunk, nchunks, seqlen, CHUNK: tl.constexpr, VARLEN: tl.constexpr):
    """Return start, length, sequence and flags of a chunk."""
    if VARLEN:
        row = table_ptr + chunk * 4
        return tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    start = chunk * CHUNK
    flags = tl.where(chunk == 0, 1, 0) + tl.where(chunk == nchunks - 1, 2, 0)
    return start, tl.minimum(CHUNK, seqlen - start), pid_b, flags


@triton.jit
def _ssd_fwd_chunks_kernel(cu_seqlens_ptr, table_ptr, nseqs, nchunks, seqlen, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (sequences + 1): a program writes the rows of one sequence's chunks; the last one fills the unused rows.

    Row: start, length, sequence, flags (16 bytes). An empty sequence owns one empty chunk, so that its state passes on.
    """
    pid_s = tl.program_id(0)
    before = tl.zeros((BLOCK,), tl.int32)
    for s in range(0, pid_s, BLOCK):
        offs_s = s + tl.arange(0, BLOCK)
        begin, end = sequence(cu_seqlens_ptr, offs_s, offs_s < pid_s, seqlen)
        count = tl.maximum((end - begin + CHUNK - 1) // CHUNK, 1)
        before += tl.where(offs_s < pid_s, count, 0)
    base = tl.sum(before, 0)
    begin, end = sequence(cu_seqlens_ptr, pid_s, pid_s < nseqs, seqlen)
    count = tl.where(pid_s < nseqs, tl.maximum((end - begin + CHUNK - 1) // CHUNK, 1), nchunks - base)
    for c in range(0, count, BLOCK):
        offs_c = c + tl.arange(0, BLOCK)
        inside = (offs_c < count) & (base + offs_c < nchunks)
        row = table_ptr + (base + offs_c) * 4
        start = begin + offs_c * CHUNK
        flags = tl.where(offs_c == 0, 1, 0) + tl.where(offs_c == count - 1, 2, 0)
        flags = tl.where(pid_s < nseqs, flags, 0)
        tl.store(row, start, mask=inside)
        tl.store(row + 1, tl.maximum(tl.minimum(end - start, CHUNK), 0), mask=inside)
        tl.store(row + 2, tl.zeros((BLOCK,), tl.int32) + pid_s, mask=inside)
        tl.store(row + 3, flags, mask=inside)


@triton.jit
def _ssd_fwd_prepare_kernel(
    table_ptr, dt_ptr, A_ptr, dt_bias_ptr, B_ptr, C_ptr, decay_ptr, step_ptr, cb_ptr,
    seqlen, nchunks, nheads, ngroups, dstate, dt_min, dt_max,
    stride_dt_b, stride_dt_t, stride_dt_h, stride_B_b, stride_B_t, stride_B_g, stride_C_b, stride_C_t, stride_C_g,
    CHUNK: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, SOFTPLUS: tl.constexpr,
    VARLEN: tl.constexpr, SHIFT: tl.constexpr, SIGNED: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (batch * chunks, groups + head blocks): a program owns one chunk of one group, or of BLOCK_H heads.

    Group programs write C·Bᵀ (CHUNK x CHUNK, float32) on and below the diagonal. Head programs write step = dt after
    bias, softplus and limits (0 beyond the chunk) and decay = the running sum of step * A * log2(e), in float32 parts.
    With SHIFT, for the kernels in Gluon, decay - log2(step) takes the place of step, columns of C·Bᵀ come in another
    order, and the next kernel may start early. With SIGNED, for steps of any sign, it is decay - log2(abs(step)), and
    its last bit says whether the step is negative.
    """
    if SHIFT:
        let_next_start()
    pid_c = tl.program_id(0)
    pid_g = tl.program_id(1)
    pid_b = pid_c // nchunks
    start, length, _, _ = chunk_span(table_ptr, pid_b, pid_c % nchunks, nchunks, seqlen, CHUNK, VARLEN)
    offs_t = tl.arange(0, CHUNK)
    inside = offs_t < length
    pid_b = pid_b.to(tl.int64)
    start = start.to(tl.int64)
    if pid_g < ngroups:
        offs_n = tl.arange(0, BLOCK_N)
        offs_s = offs_t
        if SHIFT:  # the order of columns in which `_walk_y` reads them, four at a time and without bank conflicts
            offs_s = offs_t // 32 * 32 + offs_t % 8 // 2 * 8 + offs_t % 32 // 8 * 2 + offs_t % 2
        mask_tn = inside[:, None] & (offs_n[None, :] < dstate)
        mask_sn = (offs_s < length)[:, None] & (offs_n[None, :] < dstate)
        C_rows = C_ptr + pid_b * stride_C_b + start * stride_C_t + pid_g * stride_C_g
        B_rows = B_ptr + pid_b * stride_B_b + start * stride_B_t + pid_g * stride_B_g
        C_tile = tl.load(C_rows + offs_t[:, None] * stride_C_t + offs_n[None, :], mask=mask_tn, other=0.0)
        B_tile = tl.load(B_rows + offs_s[:, None] * stride_B_t + offs_n[None, :], mask=mask_sn, other=0.0)
        cb = dot(C_tile, tl.trans(B_tile), None, PRECISION)
        cb = tl.where(offs_t[:, None] >= offs_s[None, :], cb, 0.0)
        cb_rows = cb_ptr + (pid_c.to(tl.int64) * ngroups + pid_g) * CHUNK * CHUNK
        tl.store(cb_rows + offs_t[:, None] * CHUNK + offs_t[None, :], cb.to(cb_ptr.dtype.element_ty))
    else:
        offs_h = (pid_g - ngroups) * BLOCK_H + tl.arange(0, BLOCK_H)
        heads = offs_h < nheads
        dt_rows = dt_ptr + pid_b * stride_dt_b + start * stride_dt_t
        step = load_steps(
            dt_rows, dt_bias_ptr, offs_h, heads, inside, stride_dt_t, stride_dt_h, dt_min, dt_max, SOFTPLUS
        )
        A = load_rates(A_ptr, offs_h, heads)
        rows = (pid_c.to(tl.int64) * nheads + offs_h[:, None]) * CHUNK + offs_t[None, :]
        if PARTS == 2:
            total = tl.cumsum(log2_decays(step, A, True), axis=1)
            decay = total.to(tl.float32)
            low = (total - decay.to(tl.float64)).to(tl.float32)
        else:
            log2_decay = log2_decays(step, A, False)
            if SHIFT:  # An infinite step spoils all that comes after it; its logarithm alone would not.
                log2_decay = tl.where(tl.abs(step) < float("inf"), log2_decay, float("nan"))
            decay = tl.cumsum(log2_decay, axis=1)
        if SHIFT:
            shifted = decay - tl.log2(tl.abs(step))
            if SIGNED:
                bits = (shifted.to(tl.int32, bitcast=True) & -2) | (step < 0.0).to(tl.int32)
                shifted = bits.to(tl.float32, bitcast=True)
            step = shifted
        tl.store(step_ptr + rows, step, mask=heads[:, None])
        rows = (pid_c.to(tl.int64) * nheads + offs_h[:, None]) * (CHUNK * PARTS) + offs_t[None, :]
        tl.store(decay_ptr + rows, decay, mask=heads[:, None])
        if PARTS == 2:
            tl.store(decay_ptr + rows + CHUNK, low, mask=heads[:, None])


@triton.jit
def _begun(state, initial_ptr, at, flags, offs_np, mask_np, PARTS: tl.constexpr):
    """Return the state before a chunk of a pack: where its sequence begins, the initial one, which is at ``at``."""
    begins = (flags & FIRST) != 0
    state = tl.where(begins, 0.0, state)
    if initial_ptr is not None:
        if PARTS == 1:
            # Without the branch, Triton copies initial states ahead for each chunk: twice the time of the scan.
            if begins:
                state = tl.load(initial_ptr + at + offs_np, mask=mask_np, other=0.0).to(tl.float32)
        else:
            # Triton 3.6 cannot compile the products of parts of float32 after such a branch. Flags as a tensor: the
            # interpreter takes no scalar into a mask.
            read = mask_np & (((offs_np * 0 + flags) & FIRST) != 0)
            state += tl.load(initial_ptr + at + offs_np, mask=read, other=0.0).to(tl.float32)
    return state


@triton.jit
def _ssd_fwd_state_kernel(
    table_ptr, x_ptr, B_ptr, decay_ptr, step_ptr, initial_ptr, piece_state_ptr, piece_decay_ptr,
    seqlen, nchunks, piece_chunks, npieces, nheads, ngroups, headdim, dstate,
    stride_x_b, stride_x_t, stride_x_h, stride_B_b, stride_B_t, stride_B_g,
    CHUNK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, VARLEN: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (heads * blocks of head channels, pieces, batch): a program owns one piece of one head block.

    Reads x and B of the piece once. Keeps (state, channels) in float32 registers. Writes the state from the piece's
    own tokens, and the log2 decay that it applies to earlier states (-inf if a sequence begins in it).
    """
    blocks_p = tl.cdiv(headdim, BLOCK_P)
    pid_h = tl.program_id(0) // blocks_p
    pid_p = tl.program_id(0) % blocks_p
    pid_s = tl.program_id(1)
    pid_b = tl.program_id(2)
    pid_g = pid_h // (nheads // ngroups)
    offs_t = tl.arange(0, CHUNK)
    offs_n = tl.arange(0, BLOCK_N)
    offs_p = pid_p * BLOCK_P + tl.arange(0, BLOCK_P)
    mask_n = offs_n < dstate
    mask_p = offs_p < headdim
    mask_np = mask_n[:, None] & mask_p[None, :]
    offs_np = offs_p[None, :] * dstate + offs_n[:, None]
    x_base = x_ptr + pid_b.to(tl.int64) * stride_x_b + pid_h * stride_x_h
    B_base = B_ptr + pid_b.to(tl.int64) * stride_B_b + pid_g * stride_B_g
    state = tl.zeros((BLOCK_N, BLOCK_P), tl.float32)
    total = tl.zeros((), tl.float32)
    first = pid_s * piece_chunks
    for chunk in tl.range(first, tl.minimum(first + piece_chunks, nchunks), num_stages=STAGES):
        start, length, seq, flags = chunk_span(table_ptr, pid_b, chunk, nchunks, seqlen, CHUNK, VARLEN)
        inside = offs_t < length
        start = start.to(tl.int64)
        row = (pid_b * nchunks + chunk).to(tl.int64) * nheads + pid_h
        x_tile = tl.load(x_base + start * stride_x_t + offs_t[:, None] * stride_x_t + offs_p[None, :],
                         mask=inside[:, None] & mask_p[None, :], other=0.0)  # fmt: skip
        B_tile = tl.load(B_base + start * stride_B_t + offs_t[:, None] * stride_B_t + offs_n[None, :],
                         mask=inside[:, None] & mask_n[None, :], other=0.0)  # fmt: skip
        step = tl.load(step_ptr + row * CHUNK + offs_t)
        _, to_end, whole, last, _, _ = load_decay(decay_ptr, row, offs_t, CHUNK, PARTS)
        if VARLEN:
            total = tl.where((flags & FIRST) != 0, float("-inf"), total)
            state = _begun(
                state,
                initial_ptr,
                (seq.to(tl.int64) * nheads + pid_h) * headdim * dstate,
                flags,
                offs_np,
                mask_np,
                PARTS,
            )
        total += last
        x_weighted = (x_tile * (to_end * step)[:, None]).to(x_tile.dtype)
        state = dot(tl.trans(B_tile), x_weighted, state * whole, PRECISION)
    piece = (pid_b * npieces + pid_s).to(tl.int64) * nheads + pid_h
    tl.store(piece_state_ptr + piece * headdim * dstate + offs_np, state, mask=mask_np)
    if pid_p == 0:
        tl.store(piece_decay_ptr + piece, total)


@triton.jit
def _ssd_fwd_pass_kernel(
    piece_state_ptr, piece_decay_ptr, initial_ptr, npieces, nheads, size,
    BLOCK: tl.constexpr, VARLEN: tl.constexpr, HOPPER: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of a state, heads, batch): a program owns BLOCK elements of one head's state, for all pieces.

    Reads and writes each piece's state once, in place: the state from its own tokens becomes the state after it.
    Float32. In a pack, `state` has put the initial states of the sequences in already. HOPPER: `scan` may start early.
    """
    if HOPPER:
        let_next_start()
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pid_h = tl.program_id(1)
    pid_b = tl.program_id(2).to(tl.int64)
    mask = offs < size
    state = tl.zeros((BLOCK,), tl.float32)
    if initial_ptr is not None and not VARLEN:
        state = tl.load(initial_ptr + (pid_b * nheads + pid_h) * size + offs, mask=mask, other=0.0).to(tl.float32)
    for s in tl.range(0, npieces, num_stages=3):
        piece = (pid_b * npieces + s) * nheads + pid_h
        own = tl.load(piece_state_ptr + piece * size + offs, mask=mask, other=0.0)
        state = state * exp2(tl.load(piece_decay_ptr + piece)) + own
        tl.store(piece_state_ptr + piece * size + offs, state, mask=mask)


@triton.jit
def _ssd_fwd_scan_kernel(
    table_ptr, x_ptr, B_ptr, C_ptr, cb_ptr, decay_ptr, step_ptr, D_ptr, z_ptr, initial_ptr,
    piece_state_ptr, piece_decay_ptr, y_ptr, final_ptr,
    seqlen, nchunks, segment_chunks, segment_pieces, npieces, nheads, ngroups, headdim, dstate,
    stride_x_b, stride_x_t, stride_x_h, stride_B_b, stride_B_t, stride_B_g, stride_C_b, stride_C_t, stride_C_g,
    stride_z_b, stride_z_t, stride_z_h, stride_D_h, stride_D_p,
    CHUNK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, VARLEN: tl.constexpr,
    PASSED: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, OWN_CB: tl.constexpr,
):  # fmt: skip
    """Grid (heads * blocks of head channels, segments, batch): a program owns one segment of one head block.

    Reads x, B, C, z and C·Bᵀ of the segment once and writes y once; the (state, channels) tile stays in float32
    registers over the whole segment. Its rows are ragged (a chunk may be short); so may be channels and state. With
    OWN_CB, for groups of one head, it forms C·Bᵀ itself.
    """
    blocks_p = tl.cdiv(headdim, BLOCK_P)
    pid_h = tl.program_id(0) // blocks_p
    pid_p = tl.program_id(0) % blocks_p
    pid_s = tl.program_id(1)
    pid_b = tl.program_id(2)
    pid_g = pid_h // (nheads // ngroups)
    offs_t = tl.arange(0, CHUNK)
    offs_n = tl.arange(0, BLOCK_N)
    offs_p = pid_p * BLOCK_P + tl.arange(0, BLOCK_P)
    mask_n = offs_n < dstate
    mask_p = offs_p < headdim
    mask_np = mask_n[:, None] & mask_p[None, :]
    offs_np = offs_p[None, :] * dstate + offs_n[:, None]
    size = headdim * dstate
    x_base = x_ptr + pid_b.to(tl.int64) * stride_x_b + pid_h * stride_x_h
    B_base = B_ptr + pid_b.to(tl.int64) * stride_B_b + pid_g * stride_B_g
    C_base = C_ptr + pid_b.to(tl.int64) * stride_C_b + pid_g * stride_C_g
    y_base = y_ptr + (pid_b.to(tl.int64) * seqlen * nheads + pid_h) * headdim

    # The state before the segment.
    state = tl.zeros((BLOCK_N, BLOCK_P), tl.float32)
    piece = pid_b.to(tl.int64) * npieces * nheads + pid_h
    pieces = pid_s * segment_pieces
    if PASSED:
        if pid_s > 0:
            before = piece_state_ptr + (piece + (pieces - 1) * nheads) * size
            state = tl.load(before + offs_np, mask=mask_np, other=0.0)
        elif initial_ptr is not None and not VARLEN:
            initial = initial_ptr + (pid_b.to(tl.int64) * nheads + pid_h) * size
            state = tl.load(initial + offs_np, mask=mask_np, other=0.0).to(tl.float32)
    else:
        if initial_ptr is not None and not VARLEN:
            initial = initial_ptr + (pid_b.to(tl.int64) * nheads + pid_h) * size
            state = tl.load(initial + offs_np, mask=mask_np, other=0.0).to(tl.float32)
        for s in range(0, pieces):
            own = tl.load(piece_state_ptr + (piece + s * nheads) * size + offs_np, mask=mask_np, other=0.0)
            state = state * exp2(tl.load(piece_decay_ptr + piece + s * nheads)) + own

    if D_ptr is not None:
        D = tl.load(D_ptr + pid_h * stride_D_h + offs_p * stride_D_p, mask=mask_p, other=0.0).to(tl.float32)
    first = pid_s * segment_chunks
    for chunk in tl.range(first, tl.minimum(first + segment_chunks, nchunks), num_stages=STAGES):
        start, length, seq, flags = chunk_span(table_ptr, pid_b, chunk, nchunks, seqlen, CHUNK, VARLEN)
        inside = offs_t < length
        start = start.to(tl.int64)
        pid_c = (pid_b * nchunks + chunk).to(tl.int64)
        row = pid_c * nheads + pid_h
        mask_tp = inside[:, None] & mask_p[None, :]
        mask_tn = inside[:, None] & mask_n[None, :]
        C_tile = tl.load(C_base + start * stride_C_t + offs_t[:, None] * stride_C_t + offs_n[None, :],
                         mask=mask_tn, other=0.0)  # fmt: skip
        x_tile = tl.load(x_base + start * stride_x_t + offs_t[:, None] * stride_x_t + offs_p[None, :],
                         mask=mask_tp, other=0.0)  # fmt: skip
        B_tile = tl.load(B_base + start * stride_B_t + offs_t[:, None] * stride_B_t + offs_n[None, :],
                         mask=mask_tn, other=0.0)  # fmt: skip
        if OWN_CB:
            cb = dot(C_tile, tl.trans(B_tile), None, PRECISION)
        else:
            cb = tl.load(cb_ptr + (pid_c * ngroups + pid_g) * CHUNK * CHUNK + offs_t[:, None] * CHUNK + offs_t[None, :])
        step = tl.load(step_ptr + row * CHUNK + offs_t)
        from_start, to_end, whole, _, decay, low = load_decay(decay_ptr, row, offs_t, CHUNK, PARTS)
        if VARLEN:
            state = _begun(
                state, initial_ptr, (seq.to(tl.int64) * nheads + pid_h) * size, flags, offs_np, mask_np, PARTS
            )
        # What came before the chunk, then what the chunk adds itself.
        y = dot(C_tile, state.to(C_tile.dtype), None, PRECISION) * from_start[:, None]
        causal = offs_t[:, None] >= offs_t[None, :]
        between = decay[:, None] - decay[None, :]
        if PARTS == 2:
            between += low[:, None] - low[None, :]
        grown = exp2(tl.where(causal, between, 0.0))
        mix = tl.where(causal, cb * grown * step[None, :], 0.0)
        # In the product, what is not finite would reach the tokens before it as well: zero times it is NaN.
        finite = tl.abs(x_tile.to(tl.float32)) < float("inf")
        y = dot(mix.to(x_tile.dtype), tl.where(finite, x_tile, 0.0).to(x_tile.dtype), y, PRECISION)
        bad = tl.min(tl.where(finite, CHUNK, offs_t[:, None]), axis=0)  # first token that is not, a channel
        y = tl.where(offs_t[:, None] >= bad[None, :], float("nan"), y)
        x_weighted = (x_tile * (to_end * step)[:, None]).to(x_tile.dtype)
        state = dot(tl.trans(B_tile), x_weighted, state * whole, PRECISION)
        if D_ptr is not None:
            y += D[None, :] * x_tile
        if z_ptr is not None:
            z_rows = z_ptr + pid_b.to(tl.int64) * stride_z_b + start * stride_z_t + pid_h * stride_z_h
            z_tile = tl.load(z_rows + offs_t[:, None] * stride_z_t + offs_p[None, :], mask=mask_tp, other=0.0)
            y *= silu(z_tile.to(tl.float32))
        y_rows = y_base + start * nheads * headdim
        tl.store(y_rows + offs_t[:, None] * (nheads * headdim) + offs_p[None, :],
                 y.to(y_ptr.dtype.element_ty), mask=mask_tp)  # fmt: skip
        if (flags & LAST) != 0:
            final = final_ptr + (seq.to(tl.int64) * nheads + pid_h) * size
            tl.store(final + offs_np, state.to(final_ptr.dtype.element_ty), mask=mask_np)


@triton.jit
def _ssd_step_kernel(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, state_ptr, new_state_ptr, y_ptr,
    source_ptr, target_ptr, accepted_ptr, offsets_ptr,
    ntokens, nheads, ngroups, headdim, dstate, dt_min, dt_max,
    stride_x_b, stride_x_t, stride_x_h, stride_dt_b, stride_dt_t, stride_dt_h,
    stride_B_b, stride_B_t, stride_B_g, stride_C_b, stride_C_t, stride_C_g,
    stride_z_b, stride_z_t, stride_z_h, stride_D_h, stride_D_p, stride_y_b, stride_y_t, stride_y_h,
    stride_s_b, stride_s_h, stride_s_p, stride_s_n, rows, slots, pad, columns, kept,
    stride_source_k, stride_source_m, stride_target_k, stride_target_m,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of head channels, heads, sequences): a program owns BLOCK_P channels of one head, for all tokens.

    Reads and writes its part of the state once; arithmetic is float32 and outputs use the unrounded state. With a
    target, states lie in slots; where tokens may be accepted one by one, the state after each is written.
    """
    offs_p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    offs_n = tl.arange(0, BLOCK_N)
    pid_h = tl.program_id(1)
    pid_b = tl.program_id(2).to(tl.int64)
    pid_g = pid_h // (nheads // ngroups)
    mask_p = offs_p < headdim
    mask_n = offs_n < dstate
    mask = mask_p[:, None] & mask_n[None, :]
    offs_state = pid_h * stride_s_h + offs_p[:, None] * stride_s_p + offs_n[None, :] * stride_s_n
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
    state = tl.load(state_ptr + read * stride_s_b + offs_state, mask=mask, other=0.0).to(tl.float32)
    A = tl.load(A_ptr + pid_h).to(tl.float32) * LOG2E
    for t in range(ntokens):
        step = tl.load(dt_ptr + row * stride_dt_b + t * stride_dt_t + pid_h * stride_dt_h).to(tl.float32)
        if dt_bias_ptr is not None:
            step += tl.load(dt_bias_ptr + pid_h).to(tl.float32)
        if SOFTPLUS:
            step = softplus(step)
        step = clip(step, dt_min, dt_max)
        x_row = x_ptr + row * stride_x_b + t * stride_x_t + pid_h * stride_x_h
        x = tl.load(x_row + offs_p, mask=mask_p, other=0.0).to(tl.float32)
        B = tl.load(B_ptr + row * stride_B_b + t * stride_B_t + pid_g * stride_B_g + offs_n, mask=mask_n, other=0.0)
        C = tl.load(C_ptr + row * stride_C_b + t * stride_C_t + pid_g * stride_C_g + offs_n, mask=mask_n, other=0.0)
        state = state * exp2(step * A) + (x * step)[:, None] * B.to(tl.float32)[None, :]
        y = tl.sum(state * C.to(tl.float32)[None, :], axis=1)
        if D_ptr is not None:
            y += tl.load(D_ptr + pid_h * stride_D_h + offs_p * stride_D_p, mask=mask_p, other=0.0).to(tl.float32) * x
        if z_ptr is not None:
            z_row = z_ptr + row * stride_z_b + t * stride_z_t + pid_h * stride_z_h
            y *= silu(tl.load(z_row + offs_p, mask=mask_p, other=0.0).to(tl.float32))
        if target_ptr is not None:
            y = tl.where(valid, y, nothing)
        y_row = y_ptr + row * stride_y_b + t * stride_y_t + pid_h * stride_y_h
        tl.store(y_row + offs_p, y.to(y_ptr.dtype.element_ty), mask=mask_p)
        if accepted_ptr is not None:
            slot, own = place_of_token(target_ptr, pid_b, t, slots, pad, kept, stride_target_k, stride_target_m)
            tl.store(new_state_ptr + slot * stride_s_b + offs_state, state.to(new_state_ptr.dtype.element_ty),
                     mask=spread(own, mask))  # fmt: skip
    if accepted_ptr is None:
        tl.store(new_state_ptr + write * stride_s_b + offs_state, state.to(new_state_ptr.dtype.element_ty),
                 mask=mask)  # fmt: skip
