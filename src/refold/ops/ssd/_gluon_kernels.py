"""The two heavy kernels of the SSD forward pass written for Hopper: copy engine, asynchronous products, warp roles.

They take the places of `_ssd_fwd_state_kernel` and `_ssd_fwd_scan_kernel` for 16-bit inputs, 64 channels a head, 64 or
128 states and an even number of heads a group. Two heads (or four) of a group share a program, so that B, C and C·Bᵀ
cross the memory system once for all. `prepare` hands over ``shifted`` = decay - log2(step) in place of step, so that
decay and step of a pair of tokens are one exp2, and C·Bᵀ with zeros above its diagonal. Both kernels start while the
one before them ends (``gdc_launch_dependents``): they fetch inputs at once and wait for what it writes (``gdc_wait``).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Triton 3.6 has other names for these.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_memory = gl.shared_memory_descriptor
reinterpret = _memory.reinterpret if hasattr(_memory, "reinterpret") else _memory._reinterpret
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


def tile_layout(bits: int, rank: int) -> gl.NVMMASharedLayout:
    """Return how tiles of ``bits``-wide elements lie in shared memory: rows swizzled over 128 bytes."""
    return gl.NVMMASharedLayout(128, bits, rank)


@gluon.jit
def _exp2(v):
    """2**v, with denormal results flushed to 0."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [v], gl.float32, True, 1)


@gluon.jit
def _silu(v):
    """Gate with v * sigmoid(v), by the hardware's reciprocal."""
    u = 1.0 + _exp2(v * -1.4426950408889634)
    return v * gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [u], gl.float32, True, 1)


# The state that a piece leaves behind ---------------------------------------------------------------------------------


@gluon.jit
def _fetch_state(
    x_desc, B_desc, x_smem, B_smem, full, empty, pid_b, pid_h, pid_g, end, count,
    HEADS: gl.constexpr, CHUNK: gl.constexpr, P: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: fills a stage of shared memory a chunk, from the last chunk to the first."""
    for i in range(count):
        stage = i % STAGES
        mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
        bar = full.index(stage)
        mbarrier.expect(bar, CHUNK * (HEADS * P + N) * 2)
        start = (end - 1 - i) * CHUNK
        load_tile(B_desc, [pid_b, start, pid_g * N], bar, B_smem.index(stage))
        for which in gl.static_range(HEADS):
            x_tile = x_smem.index(stage * HEADS + which)
            load_tile(x_desc, [pid_b, start, (pid_h + which) * P], bar, x_tile)


@gluon.jit
def _sum_state(
    x_smem, B_smem, weight_smem, full, empty, decay_ptr, shifted_ptr, state_ptr, total_ptr,
    pid_b, pid_s, pid_h, end, count, nchunks, npieces, nheads,
    WHICH: gl.constexpr, HEADS: gl.constexpr, CHUNK: gl.constexpr, P: gl.constexpr, N: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """One warp group: one head. From the last chunk to the first no running state has to be decayed."""
    acc_h: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    op_h: gl.constexpr = gl.DotOperandLayout(0, acc_h, 2)
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    pid_h = pid_h + WHICH
    offs_t = gl.arange(0, CHUNK, layout=line)
    row = ((pid_b * nchunks + end - 1).to(gl.int64) * nheads + pid_h) * CHUNK
    gdc_wait()
    shifted = gl.load(shifted_ptr + row + offs_t)
    last = gl.load(decay_ptr + row + CHUNK - 1)
    total = last * 0.0
    state = warpgroup_mma_init(gl.zeros([P, N], gl.float32, layout=acc_h))
    for i in range(count):
        stage = i % STAGES
        total += last
        weight_smem.index(WHICH).store(_exp2(total - shifted))
        row = ((pid_b * nchunks + end - 1 - min(i + 1, count - 1)).to(gl.int64) * nheads + pid_h) * CHUNK
        shifted = gl.load(shifted_ptr + row + offs_t)
        last = gl.load(decay_ptr + row + CHUNK - 1)
        barrier()
        # Every warp has waited for the products of the chunk before the last one: its tiles are free.
        mbarrier.arrive(empty.index((i + STAGES - 2) % STAGES), count=1, pred=i > 1)
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        weight = weight_smem.index(WHICH).load(gl.SliceLayout(0, op_h))
        x_tile = x_smem.index(stage * HEADS + WHICH).reshape([CHUNK, P]).permute((1, 0)).load(op_h)
        x_weighted = (x_tile.to(gl.float32) * weight[None, :]).to(x_smem.dtype)
        done = warpgroup_mma_wait(0, deps=[state])
        state = warpgroup_mma(x_weighted, B_smem.index(stage).reshape([CHUNK, N]), done, is_async=True)
    state = warpgroup_mma_wait(0, deps=[state])
    offs_p = gl.arange(0, P, layout=gl.SliceLayout(1, acc_h))
    offs_n = gl.arange(0, N, layout=gl.SliceLayout(0, acc_h))
    piece = (pid_b * npieces + pid_s).to(gl.int64) * nheads + pid_h
    gl.store(state_ptr + piece * (P * N) + offs_p[:, None] * N + offs_n[None, :], state)
    gl.store(total_ptr + piece, total)


@gluon.jit
def _ssd_fwd_state_hopper_kernel(
    x_desc, B_desc, decay_ptr, shifted_ptr, state_ptr, total_ptr, nchunks, piece_chunks, npieces, nheads, ngroups,
    HEADS: gl.constexpr, CHUNK: gl.constexpr, P: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Grid (heads / HEADS, pieces, batch): a program owns one piece of 2 or 4 neighbouring heads of a group.

    Reads x and B of the piece once, writes the state it leaves behind (float32) and its log2 decay. Ragged ends of the
    time axis are cut by the copy engine.
    """
    gdc_launch_dependents()
    pid_h = gl.program_id(0) * HEADS
    pid_s = gl.program_id(1)
    pid_b = gl.program_id(2)
    pid_g = pid_h // (nheads // ngroups)
    count = min(piece_chunks, nchunks - pid_s * piece_chunks)
    end = pid_s * piece_chunks + count
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES * HEADS, 1, CHUNK, P], x_desc.layout)
    B_smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES, 1, CHUNK, N], B_desc.layout)
    weight_smem = gl.allocate_shared_memory(gl.float32, [HEADS, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=HEADS)
    # The copy engine counts on these barriers: it has to see them set up.
    fence_async_shared()
    if HEADS == 4:
        gl.warp_specialize(
            [
                (_sum_state, (
                    x_smem, B_smem, weight_smem, full, empty, decay_ptr, shifted_ptr, state_ptr, total_ptr,
                    pid_b, pid_s, pid_h, end, count, nchunks, npieces, nheads, 0, HEADS, CHUNK, P, N, STAGES,
                )),
                (_sum_state, (
                    x_smem, B_smem, weight_smem, full, empty, decay_ptr, shifted_ptr, state_ptr, total_ptr,
                    pid_b, pid_s, pid_h, end, count, nchunks, npieces, nheads, 1, HEADS, CHUNK, P, N, STAGES,
                )),
                (_sum_state, (
                    x_smem, B_smem, weight_smem, full, empty, decay_ptr, shifted_ptr, state_ptr, total_ptr,
                    pid_b, pid_s, pid_h, end, count, nchunks, npieces, nheads, 2, HEADS, CHUNK, P, N, STAGES,
                )),
                (_sum_state, (
                    x_smem, B_smem, weight_smem, full, empty, decay_ptr, shifted_ptr, state_ptr, total_ptr,
                    pid_b, pid_s, pid_h, end, count, nchunks, npieces, nheads, 3, HEADS, CHUNK, P, N, STAGES,
                )),
                (_fetch_state, (
                    x_desc, B_desc, x_smem, B_smem, full, empty, pid_b, pid_h, pid_g, end, count,
                    HEADS, CHUNK, P, N, STAGES,
                )),
            ],
            [4, 4, 4, 1],
            [112, 112, 112, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_sum_state, (
                    x_smem, B_smem, weight_smem, full, empty, decay_ptr, shifted_ptr, state_ptr, total_ptr,
                    pid_b, pid_s, pid_h, end, count, nchunks, npieces, nheads, 0, HEADS, CHUNK, P, N, STAGES,
                )),
                (_sum_state, (
                    x_smem, B_smem, weight_smem, full, empty, decay_ptr, shifted_ptr, state_ptr, total_ptr,
                    pid_b, pid_s, pid_h, end, count, nchunks, npieces, nheads, 1, HEADS, CHUNK, P, N, STAGES,
                )),
                (_fetch_state, (
                    x_desc, B_desc, x_smem, B_smem, full, empty, pid_b, pid_h, pid_g, end, count,
                    HEADS, CHUNK, P, N, STAGES,
                )),
            ],
            [4, 1],
            [208, 24],
        )  # fmt: skip


# The scan -----------------------------------------------------------------------------------------------------------


@gluon.jit
def _fetch_scan(
    x_desc, z_desc, B_desc, C_desc, cb_desc, x_smem, z_smem, B_smem, C_smem, cb_smem, full, state_full, state_empty,
    z_full, z_empty, pid_b, pid_h, pid_g, first, count, nchunks, ngroups,
    CHUNK: gl.constexpr, P: gl.constexpr, N: gl.constexpr, HAS_Z: gl.constexpr,
):  # fmt: skip
    """One warp: fills one of two stages of shared memory a chunk, as soon as all four warp groups are done with it."""
    for i in range(count):
        stage = i % 2
        for which in gl.static_range(2):
            # Outputs of the chunk before the last one are there, and with the last one's state that chunk's is summed.
            mbarrier.wait(state_empty.index(which * 2 + stage), ((i // 2) & 1) ^ 1)
            mbarrier.wait(state_full.index(which * 2 + 1 - stage), (((i + 1) // 2) & 1) ^ 1, pred=i > 1)
        bar = full.index(stage)
        mbarrier.expect(bar, CHUNK * (2 * P + 2 * N) * 2 + CHUNK * CHUNK * 4)
        chunk = first + i
        start = chunk * CHUNK
        for which in gl.static_range(2):
            x_tile = x_smem.index(stage * 2 + which)
            load_tile(x_desc, [pid_b, start, (pid_h + which) * P], bar, x_tile)
        load_tile(B_desc, [pid_b, start, pid_g * N], bar, B_smem.index(stage))
        load_tile(C_desc, [pid_b, start, pid_g * N], bar, C_smem.index(stage))
        row = ((pid_b * nchunks + chunk) * ngroups + pid_g) * CHUNK
        if i == 0:
            gdc_wait()
        load_tile(cb_desc, [row, 0], bar, cb_smem.index(stage))
        if HAS_Z:
            for which in gl.static_range(2):
                mbarrier.wait(z_empty.index(which), (i & 1) ^ 1)
                z_bar = z_full.index(which)
                mbarrier.expect(z_bar, CHUNK * P * 2)
                z_tile = z_smem.index(which)
                load_tile(z_desc, [pid_b, start, (pid_h + which) * P], z_bar, z_tile)


@gluon.jit
def _walk_state(
    x_smem, B_smem, state_smem, initial_smem, weight_smem, full, state_full, state_empty, initial_full,
    decay_ptr, shifted_ptr, piece_state_ptr, piece_decay_ptr, final_ptr,
    pid_b, pid_s, pid_h, first, count, nchunks, nsegments, segment_pieces, npieces, nheads,
    WHICH: gl.constexpr, CHUNK: gl.constexpr, P: gl.constexpr, N: gl.constexpr,
    PASSED: gl.constexpr, HAS_INITIAL: gl.constexpr,
):  # fmt: skip
    """One warp group: one head's state (P x N, float32) from chunk to chunk; a 16-bit copy of it goes to `_walk_y`."""
    dtype: gl.constexpr = x_smem.dtype
    acc_h: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    op_h: gl.constexpr = gl.DotOperandLayout(0, acc_h, 2)
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    pid_h = pid_h + WHICH
    offs_p = gl.arange(0, P, layout=gl.SliceLayout(1, acc_h))
    offs_n = gl.arange(0, N, layout=gl.SliceLayout(0, acc_h))
    offs_pn = offs_p[:, None] * N + offs_n[None, :]
    head = pid_b.to(gl.int64) * nheads + pid_h
    piece = pid_b.to(gl.int64) * npieces * nheads + pid_h
    before = pid_s * segment_pieces
    state = gl.zeros([P, N], gl.float32, layout=acc_h)
    if HAS_INITIAL:  # noqa: SIM102 (a constant, then a value)
        if (pid_s == 0) | (not PASSED):
            mbarrier.wait(initial_full.index(WHICH), 0)
            at: gl.constexpr = WHICH * (32 // initial_smem.dtype.primitive_bitwidth)
            state = initial_smem.index(at).load(acc_h).to(gl.float32)
            barrier()  # Every warp has its part: copies of later states may take its place.
    gdc_wait()
    if PASSED:
        if pid_s > 0:
            state = gl.load(piece_state_ptr + (piece + (before - 1) * nheads) * (P * N) + offs_pn)
    else:
        for s in range(before):
            own = gl.load(piece_state_ptr + (piece + s * nheads) * (P * N) + offs_pn)
            state = state * _exp2(gl.load(piece_decay_ptr + piece + s * nheads)) + own
    offs_t = gl.arange(0, CHUNK, layout=line)
    row = ((pid_b * nchunks + first).to(gl.int64) * nheads + pid_h) * CHUNK
    shifted = gl.load(shifted_ptr + row + offs_t)
    last = gl.load(decay_ptr + row + CHUNK - 1)
    for i in range(count):
        stage = i % 2
        weight_smem.index(WHICH).store(_exp2(last - shifted))
        whole = _exp2(last)
        row = ((pid_b * nchunks + first + min(i + 1, count - 1)).to(gl.int64) * nheads + pid_h) * CHUNK
        shifted = gl.load(shifted_ptr + row + offs_t)
        last = gl.load(decay_ptr + row + CHUNK - 1)
        mbarrier.wait(state_empty.index(WHICH * 2 + i % 2), ((i // 2) & 1) ^ 1)
        state_smem.index(WHICH * 2 + i % 2).store(state.to(dtype))
        fence_async_shared()
        # Every warp has waited for the products of the last chunk: its tiles are free, too.
        barrier()
        mbarrier.arrive(state_full.index(WHICH * 2 + i % 2), count=1)
        state = state * whole
        weight = weight_smem.index(WHICH).load(gl.SliceLayout(0, op_h))
        mbarrier.wait(full.index(stage), (i // 2) & 1)
        x_tile = x_smem.index(stage * 2 + WHICH).reshape([CHUNK, P]).permute((1, 0)).load(op_h)
        x_weighted = (x_tile.to(gl.float32) * weight[None, :]).to(dtype)
        state = warpgroup_mma(x_weighted, B_smem.index(stage).reshape([CHUNK, N]), state, is_async=True)
        state = warpgroup_mma_wait(0, deps=[state])
    if pid_s == nsegments - 1:
        gl.store(final_ptr + head * (P * N) + offs_pn, state.to(final_ptr.dtype.element_ty))


@gluon.jit
def _walk_y(
    y_desc, x_smem, z_smem, C_smem, cb_smem, state_smem, y_smem, shifted_smem,
    full, state_full, state_empty, z_full, z_empty, decay_ptr, shifted_ptr, D_ptr,
    pid_b, pid_h, first, count, nchunks, nheads, stride_D_h, stride_D_p,
    WHICH: gl.constexpr, CHUNK: gl.constexpr, P: gl.constexpr, N: gl.constexpr,
    HAS_Z: gl.constexpr,
):  # fmt: skip
    """One warp group: one head's outputs, chunk by chunk."""
    dtype: gl.constexpr = x_smem.dtype
    acc_y: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, P, 16])
    op_y: gl.constexpr = gl.DotOperandLayout(0, acc_y, 2)
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    # The elements of acc_y where `prepare` has put them: of a row, a thread's lie next to each other.
    wide: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32], [8, 0]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [],
        [CHUNK, CHUNK],
    )  # fmt: skip
    rows_y: gl.constexpr = gl.SliceLayout(1, acc_y)
    cols_y: gl.constexpr = gl.SliceLayout(0, acc_y)
    pid_h = pid_h + WHICH
    if D_ptr is not None:
        offs_D = gl.arange(0, P, layout=cols_y)
        D = gl.load(D_ptr + pid_h * stride_D_h + offs_D * stride_D_p).to(gl.float32)
    offs_t = gl.arange(0, CHUNK, layout=line)
    row = ((pid_b * nchunks + first).to(gl.int64) * nheads + pid_h) * CHUNK
    gdc_wait()
    offs_r = gl.arange(0, CHUNK, layout=rows_y)
    decay = gl.load(decay_ptr + row + offs_r)
    shifted = gl.load(shifted_ptr + row + offs_t)
    for i in range(count):
        stage = i % 2
        decay_t = decay
        shifted_smem.index(WHICH).store(shifted)
        barrier()
        row = ((pid_b * nchunks + first + min(i + 1, count - 1)).to(gl.int64) * nheads + pid_h) * CHUNK
        decay = gl.load(decay_ptr + row + offs_r)
        shifted = gl.load(shifted_ptr + row + offs_t)
        mbarrier.wait(full.index(stage), (i // 2) & 1)
        mbarrier.wait(state_full.index(WHICH * 2 + i % 2), (i // 2) & 1)
        # What came before the chunk, C·stateᵀ; meanwhile the decayed C·Bᵀ of the chunk itself.
        y = gl.zeros([CHUNK, P], gl.float32, layout=acc_y)
        C_tile = C_smem.index(stage).reshape([CHUNK, N])
        y = warpgroup_mma(C_tile, state_smem.index(WHICH * 2 + i % 2).permute((1, 0)), y, use_acc=False, is_async=True)
        shifted_s = shifted_smem.index(WHICH).load(cols_y)
        # Above the diagonal C·Bᵀ is 0 and the exponent only has to stay finite.
        grown = _exp2(gl.minimum(decay_t[:, None] - shifted_s[None, :], 126.0))
        cb = cb_smem.index(stage).load(wide).reshape([CHUNK, 2, 4, 2, 2, 2]).permute((0, 1, 3, 4, 2, 5))
        cb = gl.convert_layout(cb.reshape([CHUNK, CHUNK]), acc_y)
        mix = gl.convert_layout((cb * grown).to(dtype), op_y)
        from_start = _exp2(decay_t)
        y = warpgroup_mma_wait(0, deps=[y])
        y = y * from_start[:, None]
        x_tile = x_smem.index(stage * 2 + WHICH).reshape([CHUNK, P])
        y = warpgroup_mma(mix, x_tile, y, is_async=True)
        if D_ptr is not None:
            skip = x_tile.load(acc_y)
        y = warpgroup_mma_wait(0, deps=[y])
        # Every warp has waited for the products of the chunk, and the last outputs have left: their tiles are free.
        tma.store_wait(0)
        barrier()
        mbarrier.arrive(state_empty.index(WHICH * 2 + i % 2), count=1)
        if D_ptr is not None:
            y += D[None, :] * skip.to(gl.float32)
        if HAS_Z:
            mbarrier.wait(z_full.index(WHICH), i & 1)
            y *= _silu(z_smem.index(WHICH).reshape([CHUNK, P]).load(acc_y).to(gl.float32))
        y_smem.index(WHICH).reshape([CHUNK, P]).store(y.to(dtype))
        fence_async_shared()
        barrier()
        if HAS_Z:
            mbarrier.arrive(z_empty.index(WHICH), count=1)
        store_tile(y_desc, [pid_b, (first + i) * CHUNK, pid_h * P], y_smem.index(WHICH))
    tma.store_wait(0)


@gluon.jit
def _ssd_fwd_scan_hopper_kernel(
    x_desc, z_desc, B_desc, C_desc, cb_desc, y_desc, initial_desc,
    decay_ptr, shifted_ptr, D_ptr, piece_state_ptr, piece_decay_ptr, final_ptr,
    nchunks, segment_chunks, nsegments, segment_pieces, npieces, nheads, ngroups, stride_D_h, stride_D_p,
    CHUNK: gl.constexpr, P: gl.constexpr, N: gl.constexpr, PASSED: gl.constexpr,
    HAS_Z: gl.constexpr,
):  # fmt: skip
    """Grid (heads / 2, segments, batch): a program owns one segment of two neighbouring heads of a group.

    Reads x, z, B, C and C·Bᵀ of the segment once and writes y once, through the copy engine, which also cuts ragged
    ends of the time axis. Four warp groups: states and outputs of each head, both float32 in registers. Initial states
    come first and lie, until they are in registers, where copies of later states will.
    """
    pid_h = gl.program_id(0) * 2
    pid_s = gl.program_id(1)
    pid_b = gl.program_id(2)
    pid_g = pid_h // (nheads // ngroups)
    first = pid_s * segment_chunks
    count = min(segment_chunks, nchunks - first)
    dtype: gl.constexpr = x_desc.dtype
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x_smem = gl.allocate_shared_memory(dtype, [4, 1, CHUNK, P], x_desc.layout)
    B_smem = gl.allocate_shared_memory(dtype, [2, 1, CHUNK, N], B_desc.layout)
    C_smem = gl.allocate_shared_memory(dtype, [2, 1, CHUNK, N], C_desc.layout)
    cb_smem = gl.allocate_shared_memory(gl.float32, [2, CHUNK, CHUNK], cb_desc.layout)
    if HAS_Z:  # noqa: SIM108 (the other branch must not be traced)
        z_smem = gl.allocate_shared_memory(dtype, [2, 1, CHUNK, P], z_desc.layout)
    else:
        z_smem = x_smem
    y_smem = gl.allocate_shared_memory(dtype, [2, 1, CHUNK, P], y_desc.layout)
    state_smem = gl.allocate_shared_memory(dtype, [4, P, N], gl.NVMMASharedLayout(128, 16, 2))
    shifted_smem = gl.allocate_shared_memory(gl.float32, [2, CHUNK], vector)
    weight_smem = gl.allocate_shared_memory(gl.float32, [2, CHUNK], vector)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    z_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    z_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    state_full = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    state_empty = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    initial_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    # In one loop: the compiler puts a barrier between two that belong to the same allocation.
    for i in gl.static_range(4):
        if i < 2:
            mbarrier.init(full.index(i), count=1)
            mbarrier.init(z_full.index(i), count=1)
            mbarrier.init(z_empty.index(i), count=1)
            mbarrier.init(initial_full.index(i), count=1)
        mbarrier.init(state_full.index(i), count=1)
        mbarrier.init(state_empty.index(i), count=1)
    # The copy engine counts on these barriers: it has to see them set up.
    fence_async_shared()
    initial_smem = state_smem
    if initial_desc is not None:
        # A head has room for two 16-bit copies: for one state in float32, or one in 16 bits and a gap.
        bits: gl.constexpr = initial_desc.dtype.primitive_bitwidth
        initial_smem = reinterpret(state_smem, initial_desc.dtype, [64 // bits, P, N], initial_desc.layout)
        if (pid_s == 0) | (not PASSED):
            for which in gl.static_range(2):
                bar = initial_full.index(which)
                mbarrier.expect(bar, P * N * bits // 8)
                row = ((pid_b * nheads) + pid_h + which) * P
                load_tile(initial_desc, [row, 0], bar, initial_smem.index(which * (32 // bits)))
    gl.warp_specialize(
        [
            (_walk_y, (
                y_desc, x_smem, z_smem, C_smem, cb_smem, state_smem, y_smem, shifted_smem,
                full, state_full, state_empty, z_full, z_empty, decay_ptr, shifted_ptr, D_ptr,
                pid_b, pid_h, first, count, nchunks, nheads, stride_D_h, stride_D_p, 0, CHUNK, P, N, HAS_Z,
            )),
            (_walk_y, (
                y_desc, x_smem, z_smem, C_smem, cb_smem, state_smem, y_smem, shifted_smem,
                full, state_full, state_empty, z_full, z_empty, decay_ptr, shifted_ptr, D_ptr,
                pid_b, pid_h, first, count, nchunks, nheads, stride_D_h, stride_D_p, 1, CHUNK, P, N, HAS_Z,
            )),
            (_walk_state, (
                x_smem, B_smem, state_smem, initial_smem, weight_smem, full, state_full, state_empty,
                initial_full, decay_ptr, shifted_ptr, piece_state_ptr, piece_decay_ptr, final_ptr,
                pid_b, pid_s, pid_h, first, count, nchunks, nsegments, segment_pieces, npieces, nheads,
                0, CHUNK, P, N, PASSED, initial_desc is not None,
            )),
            (_walk_state, (
                x_smem, B_smem, state_smem, initial_smem, weight_smem, full, state_full, state_empty,
                initial_full, decay_ptr, shifted_ptr, piece_state_ptr, piece_decay_ptr, final_ptr,
                pid_b, pid_s, pid_h, first, count, nchunks, nsegments, segment_pieces, npieces, nheads,
                1, CHUNK, P, N, PASSED, initial_desc is not None,
            )),
            (_fetch_scan, (
                x_desc, z_desc, B_desc, C_desc, cb_desc, x_smem, z_smem, B_smem, C_smem, cb_smem,
                full, state_full, state_empty, z_full, z_empty, pid_b, pid_h, pid_g, first, count, nchunks, ngroups,
                CHUNK, P, N, HAS_Z,
            )),
        ],
        [4, 4, 4, 1],
        [112, 112, 112, 24],
    )  # fmt: skip
