"""The chain of the delta rule for Hopper: copy engine, asynchronous products, warp roles.

It replaces `_delta_chain_kernel` for 16-bit inputs and at most 128 keys. A program owns P = 64 values of one head. One
warp group keeps their transposed state (values, keys) in float32 registers. Each of its products has as its left factor
what is in registers already, so nothing of the chain from chunk to chunk goes through shared memory:

    x = v - read * (state kᵀ)      u = x Tᵀ      state = decay * state + (write * u) k

It leaves 16-bit copies of the state and of u for a second warp group, which forms y = query * (q stateᵀ) + P uᵀ; or
writes them to memory, for a backward pass. One warp loads tiles through the copy engine, some chunks ahead.

GIVES says what a kernel writes: "outputs", "states" (with u), or "maps" of segments.
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from refold.ops.triton.gluon import barrier, load_tile, store_tile


@gluon.jit
def _least(a, b):
    return gl.minimum(a, b)


@gluon.jit
def _fetch(
    given, C: gl.constexpr, N: gl.constexpr, P: gl.constexpr, STAGES: gl.constexpr, KEYED: gl.constexpr,
    ERASE: gl.constexpr, GIVES: gl.constexpr, VARLEN: gl.constexpr,
):  # fmt: skip
    """One warp: fills a stage of shared memory a chunk, as soon as all warp groups are done with it."""
    (
        q_desc, r_desc, k_desc, v_desc, T_desc, P_desc, q_smem, r_smem, k_smem, v_smem, T_smem, P_smem, full, empty,
        row_b, begin, pid_h, pid_g, tile, first, count, slot, nheads,
    ) = given  # fmt: skip
    more: gl.constexpr = (1 if KEYED and ERASE else 0) + (1 if GIVES == "outputs" else 0)
    size: gl.constexpr = (C * N * (1 + more) + C * P + C * C * (2 if GIVES == "outputs" else 1)) * 2
    gdc_wait()
    for i in range(count):
        stage = i % STAGES
        mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
        bar = full.index(stage)
        mbarrier.expect(bar, size)
        start = begin + (first + i) * C
        row = ((slot + first + i) * nheads + pid_h) * C
        if KEYED:
            load_tile(k_desc, [0, 0, row, 0], bar, k_smem.index(stage))
            if ERASE:
                load_tile(r_desc, [0, 0, row, 0], bar, r_smem.index(stage))
        else:
            load_tile(k_desc, [row_b, pid_g, start, 0], bar, k_smem.index(stage))
        load_tile(v_desc, [row_b, pid_h, start, tile * P], bar, v_smem.index(stage))
        load_tile(T_desc, [row, 0], bar, T_smem.index(stage))
        if GIVES == "outputs":
            if KEYED:
                load_tile(q_desc, [0, 0, row, 0], bar, q_smem.index(stage))
            else:
                load_tile(q_desc, [row_b, pid_g, start, 0], bar, q_smem.index(stage))
            load_tile(P_desc, [row, 0], bar, P_smem.index(stage))


@gluon.jit
def clear_tail(tile, left, layout: gl.constexpr):
    """Put zeros in place of rows ``left`` and later: those of the next sequence, which may not be finite."""
    values = tile.load(layout)
    offs = gl.arange(0, tile.shape[0], layout=gl.SliceLayout(1, layout))
    tile.store(gl.where((offs < left)[:, None], values, 0.0).to(tile.dtype))


@gluon.jit
def _load_rows(rows_ptr, row, offs_t, C: gl.constexpr, KEYED: gl.constexpr):
    """Return the factors of what is read and of what is written, and the decay, of a chunk."""
    rows = rows_ptr + row * (4 * C)
    read = gl.load(rows + offs_t)
    if KEYED:
        return read, read, gl.load(rows)
    else:
        return read, gl.load(rows + 2 * C + offs_t), gl.load(rows + 3 * C)


@gluon.jit
def _decayed(state, decay, x, KEYED: gl.constexpr, layout: gl.constexpr):
    """Return the state times its decay, NaN where x is not finite; and NaN if any of x is not, else zero."""
    spoilt = gl.sum(x * 0.0, 1)  # zero, or NaN
    rows = gl.convert_layout(spoilt, gl.SliceLayout(1, layout))
    if KEYED:
        return state * (rows[:, None] + decay[None, :]), gl.sum(spoilt, 0)
    else:
        return state * (rows + decay)[:, None], gl.sum(spoilt, 0)


@gluon.jit
def _walk(
    given, C: gl.constexpr, N: gl.constexpr, P: gl.constexpr, STAGES: gl.constexpr, KEYED: gl.constexpr,
    ERASE: gl.constexpr, GIVES: gl.constexpr, VARLEN: gl.constexpr,
):  # fmt: skip
    """One warp group: the state of one tile of values, chunk by chunk."""
    (
        entering_desc, u_desc, r_smem, k_smem, v_smem, T_smem, rows_smem, state_smem, u_smem, bad_smem, verdict_smem,
        full, empty, published, read, u_full, u_empty, rows_ptr, decay_ptr, initial_ptr, before_ptr, final_ptr,
        after_ptr, tokens, seq, pid_s, pid_h, tile, first, count, slot, nsegments, nheads, nkeys, nvalues,
        stride_i_s, stride_i_h, stride_i_n, stride_i_p,
    ) = given  # fmt: skip
    dtype: gl.constexpr = k_smem.dtype
    acc_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    acc_c: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    op_s: gl.constexpr = gl.DotOperandLayout(0, acc_s, 2)
    op_c: gl.constexpr = gl.DotOperandLayout(0, acc_c, 2)
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (N // 8), N // 8], [4, 1], [1, 0])
    blocks = gl.cdiv(nvalues, P)
    offs_p = tile * P + gl.arange(0, P, layout=gl.SliceLayout(1, acc_s))
    offs_n = gl.arange(0, N, layout=gl.SliceLayout(0, acc_s))
    head = seq.to(gl.int64) * nheads + pid_h
    inside = (offs_p < nvalues)[:, None] & (offs_n < nkeys)[None, :]
    state = gl.zeros([P, N], gl.float32, layout=acc_s)
    gdc_wait()
    if GIVES == "states":
        gdc_launch_dependents()  # the walk back needs what this one waited for, and nothing of this one
    if GIVES != "maps":
        if before_ptr is not None:
            before = ((head * nsegments + pid_s) * nvalues + offs_p[:, None]) * nkeys + offs_n[None, :]
            state = gl.load(before_ptr + before, mask=inside, other=0.0)
        elif initial_ptr is not None:
            rows = initial_ptr + (seq.to(gl.int64) * stride_i_s + pid_h.to(gl.int64) * stride_i_h)
            before = offs_p[:, None].to(gl.int64) * stride_i_p + offs_n[None, :].to(gl.int64) * stride_i_n
            state = gl.load(rows + before, mask=inside, other=0.0).to(gl.float32)
    else:  # the map begins with the identity
        state = gl.where(offs_p[:, None] - blocks * P == offs_n[None, :], 1.0, 0.0)
    offs_t = gl.arange(0, C, layout=line)
    cols = gl.arange(0, C, layout=gl.SliceLayout(0, acc_c))
    row = (slot + first).to(gl.int64) * nheads + pid_h
    read_next, write_next, decay_next = _load_rows(rows_ptr, row, offs_t, C, KEYED)
    for i in range(count):
        stage = i % STAGES
        half = i % 2
        row = (slot + first + i).to(gl.int64) * nheads + pid_h
        rows_smem.index(half * 2).store(read_next)
        if not KEYED:
            rows_smem.index(half * 2 + 1).store(write_next)
        decay = decay_next
        after = (slot + first + gl.minimum(i + 1, count - 1)).to(gl.int64) * nheads + pid_h
        read_next, write_next, decay_next = _load_rows(rows_ptr, after, offs_t, C, KEYED)
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        left = tokens - (first + i) * C
        k_tile = k_smem.index(stage).reshape([C, N])
        if VARLEN and not KEYED:  # noqa: SIM102 (a constant, then a value)
            # What is not finite in the next sequence, which begins here, would reach this one.
            if left < C:
                clear_tail(k_tile, left, flat)
                fence_async_shared()
                barrier()
        narrow = state.to(dtype)
        x = gl.zeros([P, C], gl.float32, layout=acc_c)
        if ERASE:
            r_tile = k_tile
            if KEYED:
                r_tile = r_smem.index(stage).reshape([C, N])
            narrow_op = gl.convert_layout(narrow, op_c)
            x = warpgroup_mma(narrow_op, r_tile.permute((1, 0)), x, use_acc=False, is_async=True)
        if GIVES == "outputs":
            mbarrier.wait(read.index(0), (i & 1) ^ 1)
            state_smem.store(narrow)
            fence_async_shared()
        elif GIVES == "states":
            tma.store_wait(2)  # of the last chunk but one
        # Every warp has waited for the products of the last chunk: its tiles are free.
        barrier()
        mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), count=1, pred=i > 0)
        if GIVES == "outputs":
            mbarrier.arrive(published.index(0), count=1)
        elif GIVES == "states":
            state_smem.index(half).reshape([P, N]).store(narrow)
            fence_async_shared()
            barrier()
            store_tile(entering_desc, [0, row.to(gl.int32), tile * P, 0], state_smem.index(half))
        v = v_smem.index(stage).reshape([C, P]).permute((1, 0)).load(acc_c).to(gl.float32)
        factor = rows_smem.index(half * 2).load(gl.SliceLayout(0, acc_c))
        if ERASE:
            x = warpgroup_mma_wait(0, deps=[x])
            x = v - x * factor[None, :]
        else:
            x = v + (factor * 0.0)[None, :]
        if VARLEN:
            x = gl.where((cols < left)[None, :], x, 0.0)
        u = gl.zeros([P, C], gl.float32, layout=acc_c)
        T_tile = T_smem.index(stage).permute((1, 0))
        if KEYED:
            decay = gl.load(decay_ptr + row * nkeys + offs_n, mask=offs_n < nkeys, other=0.0)
        verdict = decay_next * 0.0
        if not ERASE:  # ptxas would wait for the product that starts now, since it has waited for none of this chunk
            state, verdict = _decayed(state, decay, x, KEYED, acc_s)
        u = warpgroup_mma(gl.convert_layout(x.to(dtype), op_c), T_tile, u, use_acc=False, is_async=True)
        if ERASE:
            state, verdict = _decayed(state, decay, x, KEYED, acc_s)
        u = warpgroup_mma_wait(0, deps=[u])
        if verdict != 0.0:
            # Zero times NaN is NaN: in the product, what is not finite has reached the tokens before it as well. So
            # once more, with zeros in its place, and the outputs are told from where on they are NaN.
            finite = gl.abs(x) < float("inf")
            clean = gl.where(finite, x, 0.0).to(dtype)
            u = warpgroup_mma(gl.convert_layout(clean, op_c), T_tile, u, use_acc=False, is_async=True)
            u = warpgroup_mma_wait(0, deps=[u])
            bad = gl.reduce(gl.where(finite, C, cols[None, :]), 1, _least).to(gl.int32)
            if GIVES == "outputs":
                mbarrier.wait(u_empty.index(0), (i & 1) ^ 1)
                bad_smem.store(bad)
            elif GIVES == "states":
                u = gl.where(cols[None, :] >= bad[:, None], float("nan"), u)
        written = u
        if not KEYED:
            written = u * rows_smem.index(half * 2 + 1).load(gl.SliceLayout(0, acc_c))[None, :]
        written = gl.convert_layout(written.to(dtype), op_s)
        state = warpgroup_mma(written, k_tile, state, is_async=True)
        if GIVES == "states":
            u_smem.index(half).reshape([C, P]).permute((1, 0)).store(u.to(dtype))
            fence_async_shared()
            barrier()
            store_tile(u_desc, [0, 0, row.to(gl.int32) * C, tile * P], u_smem.index(half))
        if GIVES == "outputs":
            mbarrier.wait(u_empty.index(0), (i & 1) ^ 1)
            u_smem.store(u.to(dtype))
            verdict_smem.store(gl.zeros([1], gl.float32, layout=line) + verdict)
            fence_async_shared()
            barrier()
            mbarrier.arrive(u_full.index(0), count=1)
        # Waited for at once: of a sum in flight over the end of a loop, ptxas runs every product alone.
        state = warpgroup_mma_wait(0, deps=[state])
    if GIVES == "states":
        tma.store_wait(0)
    elif GIVES == "outputs":
        if pid_s == nsegments - 1:
            state_at = offs_n[None, :].to(gl.int64) * nvalues + offs_p[:, None]
            gl.store(final_ptr + head * nkeys * nvalues + state_at, state, mask=inside)
    else:
        which = offs_p - gl.where(tile < blocks, 0, blocks * P - nvalues)
        keep = gl.where(tile < blocks, nvalues, nvalues + nkeys)
        state_at = ((head * nsegments + pid_s) * (nvalues + nkeys) + which[:, None]) * nkeys + offs_n[None, :]
        gl.store(after_ptr + state_at, state, mask=(which < keep)[:, None] & (offs_n < nkeys)[None, :])


@gluon.jit
def _put_out(
    given, C: gl.constexpr, N: gl.constexpr, P: gl.constexpr, STAGES: gl.constexpr, KEYED: gl.constexpr,
    ERASE: gl.constexpr, GIVES: gl.constexpr, VARLEN: gl.constexpr,
):  # fmt: skip
    """One warp group: the outputs of one tile of values, chunk by chunk."""
    (
        y_desc, q_smem, P_smem, y_smem, state_smem, u_smem, bad_smem, verdict_smem, full, empty,
        published, read, u_full, u_empty, rows_ptr, y_ptr,
        row_b, begin, tokens, pid_h, tile, first, count, slot, seqlen, nheads, nvalues,
    ) = given  # fmt: skip
    dtype: gl.constexpr = q_smem.dtype
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, P, 16])
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    least: gl.constexpr = C if VARLEN else 0
    offs_t = gl.arange(0, C, layout=gl.SliceLayout(1, acc))
    offs_p = tile * P + gl.arange(0, P, layout=gl.SliceLayout(0, acc))
    gdc_wait()
    row = (slot + first).to(gl.int64) * nheads + pid_h
    query_next = gl.load(rows_ptr + row * (4 * C) + C + offs_t)
    for i in range(count):
        stage = i % STAGES
        query = query_next
        row = (slot + first + gl.minimum(i + 1, count - 1)).to(gl.int64) * nheads + pid_h
        query_next = gl.load(rows_ptr + row * (4 * C) + C + offs_t)
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        mbarrier.wait(published.index(0), i & 1)
        y = gl.zeros([C, P], gl.float32, layout=acc)
        q_tile = q_smem.index(stage).reshape([C, N])
        y = warpgroup_mma(q_tile, state_smem.permute((1, 0)), y, use_acc=False, is_async=True)
        y = warpgroup_mma_wait(0, deps=[y])
        barrier()
        mbarrier.arrive(read.index(0), count=1)
        y = y * query[:, None]
        mbarrier.wait(u_full.index(0), i & 1)
        verdict = gl.sum(verdict_smem.load(line), 0)
        y = warpgroup_mma(P_smem.index(stage), u_smem.permute((1, 0)), y, is_async=True)
        y = warpgroup_mma_wait(0, deps=[y])
        if verdict != 0.0:
            bad = bad_smem.load(gl.SliceLayout(0, acc))
            y = gl.where(offs_t[:, None] >= bad[None, :], float("nan"), y)
        tma.store_wait(0)
        # Every warp has waited for the products of the chunk, and the last outputs have left: their tiles are free.
        barrier()
        mbarrier.arrive(u_empty.index(0), count=1)
        mbarrier.arrive(empty.index(stage), count=1)
        start = begin + (first + i) * C
        left = tokens - (first + i) * C
        if left < least:  # the next sequence begins here
            at = ((row_b.to(gl.int64) * seqlen + start + offs_t) * nheads + pid_h) * nvalues
            keep = (offs_t < left)[:, None] & (offs_p < nvalues)[None, :]
            gl.store(y_ptr + at[:, None] + offs_p[None, :], y.to(dtype), mask=keep)
        else:
            y_smem.reshape([C, P]).store(y.to(dtype))
            fence_async_shared()
            barrier()
            store_tile(y_desc, [row_b, pid_h, start, tile * P], y_smem)
    tma.store_wait(0)


@gluon.jit
def _delta_chain_hopper_kernel(
    q_desc, r_desc, k_desc, v_desc, T_desc, P_desc, y_desc, entering_desc, u_desc,
    rows_ptr, decay_ptr, initial_ptr, before_ptr, cu_seqlens_ptr, y_ptr, final_ptr, after_ptr,
    seqlen, nchunks, nsegments, nheads, ngroups, nkeys, nvalues, stride_i_s, stride_i_h, stride_i_n, stride_i_p,
    C: gl.constexpr, N: gl.constexpr, P: gl.constexpr, STAGES: gl.constexpr, KEYED: gl.constexpr,
    ERASE: gl.constexpr, GIVES: gl.constexpr, VARLEN: gl.constexpr,
):  # fmt: skip
    """Grid (heads x tiles, segments, sequences): as `_delta_chain_kernel`.

    Tiles past the values are those of the map: the copy engine reads zeros as their values.
    """
    tiles = gl.cdiv(nvalues, P)
    if GIVES == "maps":
        tiles += gl.cdiv(nkeys, P)
    pid_h = gl.program_id(0) // tiles
    tile = gl.program_id(0) % tiles
    pid_s = gl.program_id(1)
    seq = gl.program_id(2)
    pid_g = pid_h // (nheads // ngroups)
    row_b = seq
    begin = seq * 0
    tokens = begin + seqlen
    slot = seq * nchunks
    if VARLEN:
        row_b = seq * 0
        begin = gl.minimum(gl.maximum(gl.load(cu_seqlens_ptr + seq).to(gl.int32), 0), seqlen)
        tokens = gl.minimum(gl.maximum(gl.load(cu_seqlens_ptr + seq + 1).to(gl.int32), begin), seqlen) - begin
        slot = begin // C + seq
    chunks = gl.cdiv(tokens, C)
    piece = gl.cdiv(chunks, nsegments)
    first = pid_s * piece
    count = gl.maximum(gl.minimum(piece, chunks - first), 0)
    first = gl.minimum(first, gl.maximum(chunks - 1, 0))  # of a segment without chunks, rows are loaded ahead, too
    dtype: gl.constexpr = k_desc.dtype
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, C, N], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, C, P], v_desc.layout)
    T_smem = gl.allocate_shared_memory(dtype, [STAGES, C, C], T_desc.layout)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    r_smem = k_smem
    q_smem = k_smem
    P_smem = T_smem
    y_smem = v_smem
    state_smem = T_smem
    u_smem = T_smem
    bad_smem = T_smem
    verdict_smem = T_smem
    if KEYED and ERASE:
        r_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, C, N], k_desc.layout)
    if GIVES == "states":
        state_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, P, N], entering_desc.layout)
        u_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, C, P], u_desc.layout)
    if GIVES == "outputs":
        q_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, C, N], q_desc.layout)
        P_smem = gl.allocate_shared_memory(dtype, [STAGES, C, C], P_desc.layout)
        y_smem = gl.allocate_shared_memory(dtype, [1, 1, C, P], y_desc.layout)
        state_smem = gl.allocate_shared_memory(dtype, [P, N], gl.NVMMASharedLayout(128, 16, 2))
        u_smem = gl.allocate_shared_memory(dtype, [P, C], gl.NVMMASharedLayout(128, 16, 2))
        bad_smem = gl.allocate_shared_memory(gl.int32, [P], vector)
        verdict_smem = gl.allocate_shared_memory(gl.float32, [1], vector)
    rows_smem = gl.allocate_shared_memory(gl.float32, [4, C], vector)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    published = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    u_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    u_empty = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2 if GIVES == "outputs" else 1)
    mbarrier.init(published.index(0), count=1)
    mbarrier.init(read.index(0), count=1)
    mbarrier.init(u_full.index(0), count=1)
    mbarrier.init(u_empty.index(0), count=1)
    # The copy engine counts on these barriers: it has to see them set up.
    fence_async_shared()
    fetch = (
        q_desc, r_desc, k_desc, v_desc, T_desc, P_desc, q_smem, r_smem, k_smem, v_smem, T_smem, P_smem, full, empty,
        row_b, begin, pid_h, pid_g, tile, first, count, slot, nheads,
    )  # fmt: skip
    walk = (
        entering_desc, u_desc, r_smem, k_smem, v_smem, T_smem, rows_smem, state_smem, u_smem, bad_smem, verdict_smem,
        full, empty, published, read, u_full, u_empty, rows_ptr, decay_ptr, initial_ptr, before_ptr, final_ptr,
        after_ptr, tokens, seq, pid_s, pid_h, tile, first, count, slot, nsegments, nheads, nkeys, nvalues,
        stride_i_s, stride_i_h, stride_i_n, stride_i_p,
    )  # fmt: skip
    outputs = (
        y_desc, q_smem, P_smem, y_smem, state_smem, u_smem, bad_smem, verdict_smem, full, empty,
        published, read, u_full, u_empty, rows_ptr, y_ptr,
        row_b, begin, tokens, pid_h, tile, first, count, slot, seqlen, nheads, nvalues,
    )  # fmt: skip
    if GIVES == "outputs":
        gl.warp_specialize(
            [
                (_walk, (walk, C, N, P, STAGES, KEYED, ERASE, GIVES, VARLEN)),
                (_put_out, (outputs, C, N, P, STAGES, KEYED, ERASE, GIVES, VARLEN)),
                (_fetch, (fetch, C, N, P, STAGES, KEYED, ERASE, GIVES, VARLEN)),
            ],
            [4, 1],
            [128, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_walk, (walk, C, N, P, STAGES, KEYED, ERASE, GIVES, VARLEN)),
                (_fetch, (fetch, C, N, P, STAGES, KEYED, ERASE, GIVES, VARLEN)),
            ],
            [1],
            [24],
        )
