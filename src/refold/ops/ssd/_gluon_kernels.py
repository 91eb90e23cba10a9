"""The scan of the SSD forward pass written for Hopper: copy engine, asynchronous matrix products, a warp group a head.

Takes the place of `_ssd_fwd_scan_kernel` (same inputs, same segments) for 16-bit inputs, 64 channels a head, 64 or 128
states and an even number of heads a group. Two heads of a group share one program: a warp fetches their tiles two
chunks ahead, and each head has a warp group of its own, so that B, C and C·Bᵀ cross the memory system once for both.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


def tile_layout(bits: int, rank: int) -> gl.NVMMASharedLayout:
    """Return how tiles of ``bits``-wide elements lie in shared memory: rows swizzled over 128 bytes."""
    return gl.NVMMASharedLayout(128, bits, rank)


def describe(base: Any, view: dict[str, Any]) -> TensorDescriptor:
    """Return the copy engine's description of ``base``; ``view`` was checked when the plan was made."""
    descriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__ = {"base": base, **view}
    return descriptor


@gluon.jit
def _fetch(
    x_desc, z_desc, B_desc, C_desc, cb_desc, x_smem, z_smem, B_smem, C_smem, cb_smem, full, empty,
    pid_b, pid_h, pid_g, first, count, nchunks, ngroups,
    CHUNK: gl.constexpr, P: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, HAS_Z: gl.constexpr,
):  # fmt: skip
    """One warp: fills a stage of shared memory a chunk, as soon as both heads are done with it."""
    TILE_BYTES: gl.constexpr = CHUNK * (2 * P + 2 * N) * 2 + CHUNK * CHUNK * 4 + (CHUNK * 2 * P * 2 if HAS_Z else 0)
    for i in range(count):
        stage = i % STAGES
        mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
        bar = full.index(stage)
        mbarrier.expect(bar, TILE_BYTES)
        chunk = first + i
        start = chunk * CHUNK
        tma.async_copy_global_to_shared(C_desc, [pid_b, start, pid_g * N], bar, C_smem.index(stage))
        row = ((pid_b * nchunks + chunk) * ngroups + pid_g) * CHUNK
        tma.async_copy_global_to_shared(cb_desc, [row, 0], bar, cb_smem.index(stage))
        for which in gl.static_range(2):
            x_tile = x_smem.index(stage * 2 + which)
            tma.async_copy_global_to_shared(x_desc, [pid_b, start, (pid_h + which) * P], bar, x_tile)
        tma.async_copy_global_to_shared(B_desc, [pid_b, start, pid_g * N], bar, B_smem.index(stage))
        if HAS_Z:
            for which in gl.static_range(2):
                z_tile = z_smem.index(stage * 2 + which)
                tma.async_copy_global_to_shared(z_desc, [pid_b, start, (pid_h + which) * P], bar, z_tile)


@gluon.jit
def _walk(
    y_desc, x_smem, z_smem, B_smem, C_smem, cb_smem, state_smem, y_smem, vector_smem, full, empty,
    decay_ptr, step_ptr, D_ptr, initial_ptr, segment_state_ptr, segment_decay_ptr, final_ptr,
    pid_b, pid_s, pid_h, first, count, nchunks, nsegments, nheads, stride_D_h, stride_D_p,
    WHICH: gl.constexpr, CHUNK: gl.constexpr, P: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
    PASSED: gl.constexpr, HAS_Z: gl.constexpr,
):  # fmt: skip
    """One warp group: one head's chunks in turn, with its state (P x N, float32) in registers."""
    dtype: gl.constexpr = x_smem.dtype
    acc_y: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, P, 16])
    acc_h: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    op_y: gl.constexpr = gl.DotOperandLayout(0, acc_y, 2)
    op_h: gl.constexpr = gl.DotOperandLayout(0, acc_h, 2)
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    rows_y: gl.constexpr = gl.SliceLayout(1, acc_y)
    cols_y: gl.constexpr = gl.SliceLayout(0, acc_y)
    pid_h = pid_h + WHICH
    state_smem = state_smem.index(WHICH)
    y_smem = y_smem.index(WHICH)
    decay_smem = vector_smem.index(WHICH * 3)
    step_smem = vector_smem.index(WHICH * 3 + 1)
    weight_smem = vector_smem.index(WHICH * 3 + 2)

    # The state in front of the segment.
    offs_p = gl.arange(0, P, layout=gl.SliceLayout(1, acc_h))
    offs_n = gl.arange(0, N, layout=gl.SliceLayout(0, acc_h))
    offs_pn = offs_p[:, None] * N + offs_n[None, :]
    head = pid_b.to(gl.int64) * nheads + pid_h
    segment = pid_b.to(gl.int64) * (nsegments - 1) * nheads + pid_h
    state = gl.zeros([P, N], gl.float32, layout=acc_h)
    if PASSED:
        if pid_s > 0:
            state = gl.load(segment_state_ptr + (segment + (pid_s - 1) * nheads) * (P * N) + offs_pn)
        elif initial_ptr is not None:
            state = gl.load(initial_ptr + head * (P * N) + offs_pn).to(gl.float32)
    else:
        if initial_ptr is not None:
            state = gl.load(initial_ptr + head * (P * N) + offs_pn).to(gl.float32)
        for s in range(pid_s):
            own = gl.load(segment_state_ptr + (segment + s * nheads) * (P * N) + offs_pn)
            state = state * gl.exp2(gl.load(segment_decay_ptr + segment + s * nheads)) + own

    if D_ptr is not None:
        offs_D = gl.arange(0, P, layout=cols_y)
        D = gl.load(D_ptr + pid_h * stride_D_h + offs_D * stride_D_p).to(gl.float32)
    causal = gl.arange(0, CHUNK, layout=rows_y)[:, None] >= gl.arange(0, CHUNK, layout=cols_y)[None, :]
    offs_t = gl.arange(0, CHUNK, layout=line)
    row = ((pid_b * nchunks + first).to(gl.int64) * nheads + pid_h) * CHUNK
    next_decay = gl.load(decay_ptr + row + offs_t)
    next_step = gl.load(step_ptr + row + offs_t)
    next_last = gl.load(decay_ptr + row + CHUNK - 1)
    for i in range(count):
        stage = i % STAGES
        last = next_last
        decay_smem.store(next_decay)
        step_smem.store(next_step)
        weight_smem.store(gl.exp2(last - next_decay) * next_step)
        state_smem.store(state.to(dtype))
        fence_async_shared()
        tma.store_wait(0)
        gl.thread_barrier()
        # The last chunk's tiles are free from here on: every warp has passed its products.
        mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), count=1, pred=i > 0)
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        x_tile = x_smem.index(stage * 2 + WHICH).reshape([CHUNK, P])
        B_tile = B_smem.index(stage).reshape([CHUNK, N])
        C_tile = C_smem.index(stage).reshape([CHUNK, N])
        # What came before the chunk, C·stateᵀ; meanwhile the decayed C·Bᵀ of the chunk itself.
        y = gl.zeros([CHUNK, P], gl.float32, layout=acc_y)
        y = warpgroup_mma(C_tile, state_smem.permute((1, 0)), y, use_acc=False, is_async=True)
        row = ((pid_b * nchunks + first + min(i + 1, count - 1)).to(gl.int64) * nheads + pid_h) * CHUNK
        next_decay = gl.load(decay_ptr + row + offs_t)
        next_step = gl.load(step_ptr + row + offs_t)
        next_last = gl.load(decay_ptr + row + CHUNK - 1)
        decay_t = decay_smem.load(rows_y)
        decay_s = decay_smem.load(cols_y)
        step_s = step_smem.load(cols_y)
        mix = cb_smem.index(stage).load(acc_y) * gl.exp2(decay_t[:, None] - decay_s[None, :]) * step_s[None, :]
        mix = gl.where(causal, mix, 0.0).to(dtype)
        mix = gl.convert_layout(mix, op_y)
        from_start = gl.exp2(decay_t)
        y = warpgroup_mma_wait(0, deps=[y])
        y = y * from_start[:, None]
        y = warpgroup_mma(mix, x_tile, y, is_async=True)
        # The state after the chunk.
        weight = weight_smem.load(gl.SliceLayout(0, op_h))
        x_weighted = (x_tile.permute((1, 0)).load(op_h).to(gl.float32) * weight[None, :]).to(dtype)
        state = state * gl.exp2(last)
        state = warpgroup_mma(x_weighted, B_tile, state, is_async=True)
        y = warpgroup_mma_wait(1, deps=[y])
        if D_ptr is not None:
            y += D[None, :] * x_tile.load(acc_y).to(gl.float32)
        if HAS_Z:
            z = z_smem.index(stage * 2 + WHICH).reshape([CHUNK, P]).load(acc_y).to(gl.float32)
            y *= z / (1.0 + gl.exp2(z * -1.4426950408889634))
        y_smem.reshape([CHUNK, P]).store(y.to(dtype))
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(y_desc, [pid_b, (first + i) * CHUNK, pid_h * P], y_smem)
        state = warpgroup_mma_wait(0, deps=[state])
    tma.store_wait(0)
    if pid_s == nsegments - 1:
        gl.store(final_ptr + head * (P * N) + offs_pn, state.to(final_ptr.dtype.element_ty))


@gluon.jit
def _ssd_fwd_scan_hopper_kernel(
    x_desc, z_desc, B_desc, C_desc, cb_desc, y_desc,
    decay_ptr, step_ptr, D_ptr, initial_ptr, segment_state_ptr, segment_decay_ptr, final_ptr,
    nchunks, segment_chunks, nsegments, nheads, ngroups, stride_D_h, stride_D_p,
    CHUNK: gl.constexpr, P: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, PASSED: gl.constexpr,
    HAS_Z: gl.constexpr,
):  # fmt: skip
    """Grid (heads / 2, segments, batch): a program owns one segment of two neighbouring heads of a group.

    Reads x, z, B, C and C·Bᵀ of the segment once and writes y once, through the copy engine, which also cuts ragged
    ends of the time axis; states and sums are float32 in registers.
    """
    pid_h = gl.program_id(0) * 2
    pid_s = gl.program_id(1)
    pid_b = gl.program_id(2)
    pid_g = pid_h // (nheads // ngroups)
    first = pid_s * segment_chunks
    count = min(segment_chunks, nchunks - first)
    dtype: gl.constexpr = x_desc.dtype
    x_smem = gl.allocate_shared_memory(dtype, [STAGES * 2, 1, CHUNK, P], x_desc.layout)
    B_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, N], B_desc.layout)
    C_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, N], C_desc.layout)
    cb_smem = gl.allocate_shared_memory(gl.float32, [STAGES, CHUNK, CHUNK], cb_desc.layout)
    if HAS_Z:
        z_smem = gl.allocate_shared_memory(dtype, [STAGES * 2, 1, CHUNK, P], z_desc.layout)
    else:
        z_smem = x_smem
    y_smem = gl.allocate_shared_memory(dtype, [2, 1, CHUNK, P], y_desc.layout)
    state_smem = gl.allocate_shared_memory(dtype, [2, P, N], gl.NVMMASharedLayout(128, 16, 2))
    vector_smem = gl.allocate_shared_memory(gl.float32, [6, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    gl.warp_specialize(
        [
            (_walk, (
                y_desc, x_smem, z_smem, B_smem, C_smem, cb_smem, state_smem, y_smem, vector_smem, full, empty,
                decay_ptr, step_ptr, D_ptr, initial_ptr, segment_state_ptr, segment_decay_ptr, final_ptr,
                pid_b, pid_s, pid_h, first, count, nchunks, nsegments, nheads, stride_D_h, stride_D_p,
                0, CHUNK, P, N, STAGES, PASSED, HAS_Z,
            )),
            (_walk, (
                y_desc, x_smem, z_smem, B_smem, C_smem, cb_smem, state_smem, y_smem, vector_smem, full, empty,
                decay_ptr, step_ptr, D_ptr, initial_ptr, segment_state_ptr, segment_decay_ptr, final_ptr,
                pid_b, pid_s, pid_h, first, count, nchunks, nsegments, nheads, stride_D_h, stride_D_p,
                1, CHUNK, P, N, STAGES, PASSED, HAS_Z,
            )),
            (_fetch, (
                x_desc, z_desc, B_desc, C_desc, cb_desc, x_smem, z_smem, B_smem, C_smem, cb_smem, full, empty,
                pid_b, pid_h, pid_g, first, count, nchunks, ngroups, CHUNK, P, N, STAGES, HAS_Z,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
