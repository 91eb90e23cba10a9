"""The walk back of the delta rule for Hopper: `_delta_bwd_chain_kernel` for 16-bit inputs and at most 128 keys.

A program owns P = 64 values of one head. One warp group keeps the transposed gradient of their state, D (values, keys),
in float32 registers. As in `_gluon_chain_kernels`, the left factor of each product that waits for D is in registers:

    du = write * (D kᵀ) + dyᵀ P      w = du X      dv = beta * w      D = decay * D + (query * dyᵀ) q - (read * dv) r

The products of dy do not wait for D. They run while the others are rounded. One warp loads tiles through the copy
engine, some chunks ahead.

This walk and that of the states need nothing of each other. So it starts while the states are on their way, and takes
the multiprocessors that they leave.

It raises a flag where something is not finite. There, `_delta_bwd_chain_kernel` does everything again.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from refold.ops.delta_rule._gluon_chain_kernels import clear_tail
from refold.ops.triton.gluon import barrier, load_tile, offset, store_tile


@gluon.jit
def _fetch(
    given, C: gl.constexpr, N: gl.constexpr, P: gl.constexpr, STAGES: gl.constexpr, KEYED: gl.constexpr,
    ERASE: gl.constexpr, OUTPUT: gl.constexpr, VARLEN: gl.constexpr,
):  # fmt: skip
    """One warp: fills a stage of shared memory a chunk, from the last chunk to the first."""
    (
        q_desc, r_desc, k_desc, dy_desc, X_desc, P_desc, q_smem, r_smem, k_smem, dy_smem, X_smem, P_smem, full, empty,
        row_b, begin, pid_h, pid_g, tile, first, count, slot, nheads,
    ) = given  # fmt: skip
    tiles: gl.constexpr = 3 if KEYED and ERASE else 2
    size: gl.constexpr = (C * N * tiles + C * P + C * C * (2 if ERASE else 1)) * 2
    if not OUTPUT:
        gdc_wait()
    for i in range(count):
        stage = i % STAGES
        mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
        bar = full.index(stage)
        mbarrier.expect(bar, size)
        chunk = first + count - 1 - i
        start = begin + chunk * C
        row = ((slot + chunk) * nheads + pid_h) * C
        if KEYED:
            load_tile(k_desc, [0, 0, row, 0], bar, k_smem.index(stage))
        else:
            load_tile(k_desc, [row_b, pid_g, start, 0], bar, k_smem.index(stage))
        load_tile(dy_desc, [row_b, pid_h, start, tile * P], bar, dy_smem.index(stage))
        load_tile(P_desc, [row, 0], bar, P_smem.index(stage))
        if KEYED:
            load_tile(q_desc, [0, 0, row, 0], bar, q_smem.index(stage))
        else:
            load_tile(q_desc, [row_b, pid_g, start, 0], bar, q_smem.index(stage))
        if ERASE:
            load_tile(X_desc, [row, 0], bar, X_smem.index(stage))
            if KEYED:
                load_tile(r_desc, [0, 0, row, 0], bar, r_smem.index(stage))
    if OUTPUT:
        gdc_wait()  # whoever waits for this kernel waits for the states, too


@gluon.jit
def _load_rows(rows_ptr, more_ptr, row, offs_t, C: gl.constexpr):
    """Return the factors of what is read, asked and written, and the strengths, of a chunk; and its decay."""
    rows = rows_ptr + row * (4 * C)
    beta = gl.load(more_ptr + row * (5 * C) + offs_t)
    factors = (gl.load(rows + offs_t), gl.load(rows + C + offs_t), gl.load(rows + 2 * C + offs_t), beta)
    return factors, gl.load(rows + 3 * C)


@gluon.jit
def _walk_back(
    given, C: gl.constexpr, N: gl.constexpr, P: gl.constexpr, STAGES: gl.constexpr, KEYED: gl.constexpr,
    ERASE: gl.constexpr, OUTPUT: gl.constexpr, VARLEN: gl.constexpr,
):  # fmt: skip
    """One warp group: the gradient of the state of one tile of values, chunk by chunk."""
    (
        leaving_desc, w_desc, dv_desc, q_smem, r_smem, k_smem, dy_smem, X_smem, P_smem, rows_smem, state_smem, w_smem,
        dv_smem, full, empty, rows_ptr, more_ptr, decay_ptr, dfinal_ptr, before_ptr, dv_ptr, dinitial_ptr, after_ptr,
        flags_ptr, row_b, begin, tokens, seq, pid_s, pid_h, tile, first, count, slot, nsegments, nheads, nkeys,
        nvalues,
    ) = given  # fmt: skip
    dtype: gl.constexpr = k_smem.dtype
    acc_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    acc_c: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    op_s: gl.constexpr = gl.DotOperandLayout(0, acc_s, 2)
    op_c: gl.constexpr = gl.DotOperandLayout(0, acc_c, 2)
    by_token: gl.constexpr = gl.SliceLayout(0, acc_c)
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (N // 8), N // 8], [4, 1], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    offs_p = tile * P + gl.arange(0, P, layout=gl.SliceLayout(1, acc_s))
    offs_n = gl.arange(0, N, layout=gl.SliceLayout(0, acc_s))
    inside = (offs_p < nvalues)[:, None] & (offs_n < nkeys)[None, :]
    head = seq.to(gl.int64) * nheads + pid_h
    segment = head * nsegments + pid_s
    state_at = (segment * nvalues + offs_p[:, None]) * nkeys + offs_n[None, :]
    end_at = (head * nkeys + offs_n[None, :]) * nvalues + offs_p[:, None]
    state = gl.zeros([P, N], gl.float32, layout=acc_s)
    if not OUTPUT:
        gdc_wait()
    elif before_ptr is not None:
        state = gl.load(before_ptr + state_at, mask=inside, other=0.0)
    elif dfinal_ptr is not None:
        state = gl.load(dfinal_ptr + end_at, mask=inside, other=0.0).to(gl.float32)
    offs_t = gl.arange(0, C, layout=line)
    cols = gl.arange(0, C, layout=by_token)
    rows = gl.arange(0, C, layout=gl.SliceLayout(1, flat))
    channels = tile * P + gl.arange(0, P, layout=gl.SliceLayout(0, flat))
    spoilt = gl.zeros([P], gl.float32, layout=gl.SliceLayout(1, acc_c))
    square = gl.zeros([P, C], gl.float32, layout=acc_c)
    row = (slot + gl.maximum(first + count - 1, 0)).to(gl.int64) * nheads + pid_h
    factors_next, decay_next = _load_rows(rows_ptr, more_ptr, row, offs_t, C)
    for i in range(count):
        stage = i % STAGES
        half = i % 2
        chunk = first + count - 1 - i
        row = (slot + chunk).to(gl.int64) * nheads + pid_h
        for j in gl.static_range(4):
            rows_smem.index(half * 4 + j).store(factors_next[j])
        decay = decay_next
        after = (slot + gl.maximum(chunk - 1, first)).to(gl.int64) * nheads + pid_h
        factors_next, decay_next = _load_rows(rows_ptr, more_ptr, after, offs_t, C)
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        left = tokens - chunk * C
        q_tile = q_smem.index(stage).reshape([C, N])
        k_tile = k_smem.index(stage).reshape([C, N])
        dy_tile = dy_smem.index(stage).reshape([C, P])
        r_tile = k_tile
        if KEYED and ERASE:
            r_tile = r_smem.index(stage).reshape([C, N])
        if VARLEN:  # noqa: SIM102 (a constant, then a value)
            if left < C:
                clear_tail(dy_tile, left, flat)
                if not KEYED:
                    clear_tail(q_tile, left, wide)
                    clear_tail(k_tile, left, wide)
                fence_async_shared()
                barrier()
        narrow = state.to(dtype)
        # Scaled before any product starts: else ptxas waits for it.
        if KEYED:
            decays = gl.load(decay_ptr + row * nkeys + offs_n, mask=offs_n < nkeys, other=0.0)
            state = state * decays[None, :]
        else:
            state = state * decay
        du = warpgroup_mma(
            gl.convert_layout(narrow, op_s), k_tile.permute((1, 0)), square, use_acc=False, is_async=True
        )
        of_dy = warpgroup_mma(dy_tile.permute((1, 0)), P_smem.index(stage), square, use_acc=False, is_async=True)
        tma.store_wait(3)  # of the last chunk but one
        # Every warp has waited for the products of the last chunk: its tiles are free.
        barrier()
        mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), count=1, pred=i > 0)
        if OUTPUT:
            state_smem.index(half).reshape([P, N]).store(narrow)
        asked = dy_tile.permute((1, 0)).load(acc_c).to(gl.float32)
        asked = asked * rows_smem.index(half * 4 + 1).load(by_token)[None, :]
        state = warpgroup_mma(gl.convert_layout(asked.to(dtype), op_s), q_tile, state, is_async=True)
        du, of_dy = warpgroup_mma_wait(1, deps=[du, of_dy])
        du = du * rows_smem.index(half * 4 + 2).load(by_token)[None, :] + of_dy
        if VARLEN:
            du = gl.where((cols < left)[None, :], du, 0.0)
        if ERASE:
            w = warpgroup_mma(
                gl.convert_layout(du.to(dtype), op_c), X_smem.index(stage), square, use_acc=False, is_async=True
            )
            state, w = warpgroup_mma_wait(0, deps=[state, w])
            dv = w * rows_smem.index(half * 4 + 3).load(by_token)[None, :]
            erased = dv * (rows_smem.index(half * 4).load(by_token) * -1.0)[None, :]
            state = warpgroup_mma(gl.convert_layout(erased.to(dtype), op_s), r_tile, state, is_async=True)
        else:
            w = du
            dv = w * rows_smem.index(half * 4 + 3).load(by_token)[None, :]
        if OUTPUT:
            spoilt = spoilt + gl.sum(w * 0.0, 1)  # zero, or NaN
            w_smem.index(half).reshape([C, P]).permute((1, 0)).store(w.to(dtype))
            dv_tile = dv_smem.index(half)
            dv_tile.reshape([C, P]).permute((1, 0)).store(dv.to(dtype))
            fence_async_shared()
            barrier()
            cell = row.to(gl.int32)
            store_tile(leaving_desc, [0, cell, tile * P, 0], state_smem.index(half))
            store_tile(w_desc, [0, 0, cell * C, tile * P], w_smem.index(half))
            start = begin + chunk * C
            whole = left >= 0
            if VARLEN:
                whole = left >= C
                if left < C:  # the next sequence begins here
                    at = ((start.to(gl.int64) + rows) * nheads + pid_h) * nvalues
                    keep = (rows < left)[:, None] & (channels < nvalues)[None, :]
                    gl.store(dv_ptr + at[:, None] + channels[None, :], dv_tile.reshape([C, P]).load(flat), mask=keep)
            if whole:
                store_tile(dv_desc, [row_b, pid_h, start, tile * P], dv_tile)
        # Waited for at once: of a sum in flight over the end of a loop, ptxas runs every product alone.
        state = warpgroup_mma_wait(0, deps=[state])
    if OUTPUT:
        tma.store_wait(0)
        if (dinitial_ptr is not None) and (pid_s == 0):
            gl.store(dinitial_ptr + end_at, state, mask=inside)
        bad = gl.sum(spoilt, 0) + gl.sum(gl.sum(state * 0.0, 1), 0)
        gl.store(flags_ptr + segment * gl.cdiv(nvalues, P) + tile, (bad != 0.0).to(gl.int32))
    else:
        gl.store(after_ptr + state_at, state, mask=inside)


@gluon.jit
def _delta_chain_back_hopper_kernel(
    q_desc, r_desc, k_desc, dy_desc, X_desc, P_desc, leaving_desc, w_desc, dv_desc,
    rows_ptr, more_ptr, decay_ptr, dfinal_ptr, before_ptr, cu_seqlens_ptr, dv_ptr, dinitial_ptr, after_ptr, flags_ptr,
    seqlen, nchunks, nsegments, nheads, ngroups, nkeys, nvalues,
    C: gl.constexpr, N: gl.constexpr, P: gl.constexpr, STAGES: gl.constexpr, KEYED: gl.constexpr,
    ERASE: gl.constexpr, OUTPUT: gl.constexpr, VARLEN: gl.constexpr,
):  # fmt: skip
    """Grid (heads x tiles, segments, sequences): as `_delta_bwd_chain_kernel`, and a flag for each program."""
    tiles = gl.cdiv(nvalues, P)
    pid_h = gl.program_id(0) // tiles
    tile = gl.program_id(0) % tiles
    pid_s = gl.program_id(1)
    if not OUTPUT:
        pid_s += 1
    seq = gl.program_id(2)
    pid_g = pid_h // (nheads // ngroups)
    row_b = seq
    begin = seq * 0
    tokens = begin + seqlen
    slot = seq * nchunks
    if VARLEN:
        row_b = seq * 0
        begin = offset(cu_seqlens_ptr, seq, seqlen)
        tokens = gl.maximum(offset(cu_seqlens_ptr, seq + 1, seqlen), begin) - begin
        slot = begin // C + seq
    chunks = gl.cdiv(tokens, C)
    piece = gl.cdiv(chunks, nsegments)
    first = pid_s * piece
    count = gl.maximum(gl.minimum(piece, chunks - first), 0)
    first = gl.minimum(first, gl.maximum(chunks - 1, 0))  # of a segment without chunks, rows are loaded ahead, too
    dtype: gl.constexpr = k_desc.dtype
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, C, N], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, C, N], k_desc.layout)
    dy_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, C, P], dy_desc.layout)
    P_smem = gl.allocate_shared_memory(dtype, [STAGES, C, C], P_desc.layout)
    r_smem = k_smem
    X_smem = P_smem
    state_smem = P_smem
    w_smem = P_smem
    dv_smem = P_smem
    if ERASE:
        X_smem = gl.allocate_shared_memory(dtype, [STAGES, C, C], X_desc.layout)
        if KEYED:
            r_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, C, N], r_desc.layout)
    if OUTPUT:
        state_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, P, N], leaving_desc.layout)
        w_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, C, P], w_desc.layout)
        dv_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, C, P], dv_desc.layout)
    rows_smem = gl.allocate_shared_memory(gl.float32, [8, C], vector)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    # The copy engine counts on these barriers: it has to see them set up.
    fence_async_shared()
    fetch = (
        q_desc, r_desc, k_desc, dy_desc, X_desc, P_desc, q_smem, r_smem, k_smem, dy_smem, X_smem, P_smem, full, empty,
        row_b, begin, pid_h, pid_g, tile, first, count, slot, nheads,
    )  # fmt: skip
    walk = (
        leaving_desc, w_desc, dv_desc, q_smem, r_smem, k_smem, dy_smem, X_smem, P_smem, rows_smem, state_smem, w_smem,
        dv_smem, full, empty, rows_ptr, more_ptr, decay_ptr, dfinal_ptr, before_ptr, dv_ptr, dinitial_ptr, after_ptr,
        flags_ptr, row_b, begin, tokens, seq, pid_s, pid_h, tile, first, count, slot, nsegments, nheads, nkeys,
        nvalues,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_walk_back, (walk, C, N, P, STAGES, KEYED, ERASE, OUTPUT, VARLEN)),
            (_fetch, (fetch, C, N, P, STAGES, KEYED, ERASE, OUTPUT, VARLEN)),
        ],
        [1],
        [24],
    )
