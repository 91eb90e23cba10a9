"""The heavy kernel of the SSD backward pass written for Hopper: copy engine, asynchronous products, warp roles.

It takes the places of `_ssd_bwd_keys_kernel` and `_ssd_bwd_queries_kernel` for 16-bit inputs, chunks of 64 tokens, 64
channels a head and 64 or 128 states. One warp group does the work of each, on the same tiles, which one warp fetches.
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

from refold.ops.ssd._gluon_kernels import _exp2, barrier, load_tile, store_tile

# Of decays between tokens of a chunk: what lies above the diagonal has to stay finite.
GREATEST = gl.constexpr(96.0)


@gluon.jit
def _fetch_heads(
    x_desc, dy_desc, H_desc, K_desc, B_desc, C_desc, x_smem, dy_smem, H_smem, K_smem, B_smem, C_smem,
    full, empty, keys_full, pid_b, pid_g, pid_h, start, place, count,
    CHUNK: gl.constexpr, P: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: B and C of the chunk, then fills a stage of shared memory a head."""
    mbarrier.expect(keys_full, CHUNK * N * 2 * 2)
    load_tile(B_desc, [pid_b, start, pid_g * N], keys_full, B_smem)
    load_tile(C_desc, [pid_b, start, pid_g * N], keys_full, C_smem)
    gdc_wait()
    for i in range(count):
        stage = i % STAGES
        mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
        bar = full.index(stage)
        mbarrier.expect(bar, (CHUNK * P + P * N) * 2 * 2)
        load_tile(x_desc, [pid_b, start, (pid_h + i) * P], bar, x_smem.index(stage))
        load_tile(K_desc, [(place + i) * P, 0], bar, K_smem.index(stage))
        load_tile(dy_desc, [pid_b, start, (pid_h + i) * P], bar, dy_smem.index(stage))
        load_tile(H_desc, [(place + i) * P, 0], bar, H_smem.index(stage))


@gluon.jit
def _walk_keys(
    dx_desc, x_smem, dy_smem, H_smem, K_smem, B_smem, C_smem, dx_smem, dcb_smem, decay_smem, step_smem,
    full, empty, keys_full, dcb_full, decay_ptr, step_ptr, D_ptr, dB_ptr, kept_ptr, direct_ptr, skip_ptr,
    through_ptr, sums_ptr, pid_b, pid_h, start, row, part, count, first, nheads, columns, stride_D_h, stride_D_p,
    CHUNK: gl.constexpr, P: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, D_CHANNELS: gl.constexpr,
):  # fmt: skip
    """One warp group: dx of each head and dB; matrices of pairs of tokens are (j, i)."""
    dtype: gl.constexpr = x_smem.dtype
    acc_t: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    acc_p: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, P, 16])
    acc_n: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    op_p: gl.constexpr = gl.DotOperandLayout(0, acc_p, 2)
    op_n: gl.constexpr = gl.DotOperandLayout(0, acc_n, 2)
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows_t: gl.constexpr = gl.SliceLayout(1, acc_t)
    cols_t: gl.constexpr = gl.SliceLayout(0, acc_t)
    rows_p: gl.constexpr = gl.SliceLayout(1, acc_p)
    cols_p: gl.constexpr = gl.SliceLayout(0, acc_p)
    offs_t = gl.arange(0, CHUNK, layout=line)
    offs_p = gl.arange(0, P, layout=cols_p)
    offs_16 = gl.arange(0, 16, layout=gl.SliceLayout(1, wide))
    offs_out = gl.arange(0, CHUNK, layout=rows_p)
    offs_part = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, acc_n))[:, None] * N
    offs_part = part * (CHUNK * N) + offs_part + gl.arange(0, N, layout=gl.SliceLayout(0, acc_n))[None, :]
    B_tile = B_smem.reshape([CHUNK, N])
    C_tile = C_smem.reshape([CHUNK, N])
    dB = gl.zeros([CHUNK, N], gl.float32, layout=acc_n)
    gdc_wait()
    if first > 0:  # what earlier blocks of heads have left
        dB = gl.load(dB_ptr + offs_part)
    decay = gl.load(decay_ptr + row * CHUNK + offs_t)
    step = gl.load(step_ptr + row * CHUNK + offs_t)
    last = gl.load(decay_ptr + row * CHUNK + CHUNK - 1)
    mbarrier.wait(keys_full, 0)
    cb = gl.zeros([CHUNK, CHUNK], gl.float32, layout=acc_t)
    cb = warpgroup_mma(B_tile, C_tile.permute((1, 0)), cb, use_acc=False, is_async=True)
    cb = warpgroup_mma_wait(0, deps=[cb])
    causal = gl.arange(0, CHUNK, layout=rows_t)[:, None] <= gl.arange(0, CHUNK, layout=cols_t)[None, :]
    cb = gl.where(causal, cb, 0.0)
    for i in range(count):
        stage = i % STAGES
        at = (row + i) * CHUNK
        decay_smem.store(decay)
        step_smem.store(step)
        to_last = last
        barrier()
        # Every warp has waited for the products of the last head: its tiles are free.
        mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), count=1, pred=i > 0)
        after = (row + min(i + 1, count - 1)) * CHUNK
        decay = gl.load(decay_ptr + after + offs_t)
        step = gl.load(step_ptr + after + offs_t)
        last = gl.load(decay_ptr + after + CHUNK - 1)
        x_tile = x_smem.index(stage).reshape([CHUNK, P])
        dy_tile = dy_smem.index(stage).reshape([CHUNK, P])
        K_tile = K_smem.index(stage)
        H_tile = H_smem.index(stage)
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        dX = gl.zeros([CHUNK, P], gl.float32, layout=acc_p)
        dX = warpgroup_mma(B_tile, K_tile.permute((1, 0)), dX, use_acc=False, is_async=True)
        # Meanwhile the decayed C·Bᵀ of the chunk, and <H, K>.
        grown = _exp2(gl.minimum(decay_smem.load(cols_t)[None, :] - decay_smem.load(rows_t)[:, None], GREATEST))
        mix = gl.convert_layout((cb * grown).to(dtype), op_p)
        to_end = _exp2(to_last - decay_smem.load(rows_p))
        steps = step_smem.load(rows_p)
        x_wide = x_tile.load(acc_p).to(gl.float32)
        dX = warpgroup_mma_wait(0, deps=[dX])
        dX = dX * to_end[:, None]
        kept = gl.sum(dX * x_wide, 1)
        dX = warpgroup_mma(mix, dy_tile, dX, is_async=True)
        x_weighted = gl.convert_layout((x_wide * (to_end * steps)[:, None]).to(dtype), op_n)
        dB = warpgroup_mma(x_weighted, K_tile, dB, is_async=True)
        both = gl.zeros([16, N], gl.float32, layout=wide)
        for q in gl.static_range(P // 16):
            H = H_tile.slice(q * 16, 16, dim=0).load(wide).to(gl.float32)
            both += H * K_tile.slice(q * 16, 16, dim=0).load(wide).to(gl.float32)
        gl.store(through_ptr + (row + i) * 16 + offs_16, gl.sum(both, 1) * _exp2(to_last))
        dX = warpgroup_mma_wait(1, deps=[dX])
        gl.store(kept_ptr + at + offs_out, kept * steps)
        gl.store(direct_ptr + at + offs_out, gl.sum(dX * x_wide, 1))
        dx = dX * steps[:, None]
        if D_ptr is not None:
            D = gl.load(D_ptr + (pid_h + i) * stride_D_h + offs_p * stride_D_p).to(gl.float32)
            dy = dy_tile.load(acc_p).to(gl.float32)
            dx += D[None, :] * dy
            if D_CHANNELS:
                gl.store(sums_ptr + (pid_h + i) * P + offs_p, gl.sum(dy * x_wide, 0))
            else:
                gl.store(skip_ptr + at + offs_out, gl.sum(dy * x_wide, 1))
        tma.store_wait(0)
        barrier()
        dx_smem.reshape([CHUNK, P]).store(dx.to(dtype))
        fence_async_shared()
        barrier()
        store_tile(dx_desc, [pid_b, start, (pid_h + i) * P], dx_smem)
        dB = warpgroup_mma_wait(0, deps=[dB])
    mbarrier.wait(dcb_full, 0)
    dB = warpgroup_mma(dcb_smem.permute((1, 0)), C_tile, dB, is_async=True)
    dB = warpgroup_mma_wait(0, deps=[dB])
    gl.store(dB_ptr + offs_part, dB)
    tma.store_wait(0)


@gluon.jit
def _walk_queries(
    x_smem, dy_smem, H_smem, B_smem, C_smem, dcb_smem, before_smem, decay_smem, shifted_smem,
    full, empty, keys_full, dcb_full, decay_ptr, step_ptr, dC_ptr, late_ptr, row, part, count, first,
    CHUNK: gl.constexpr, P: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp group: dC, d(C·Bᵀ) and late; matrices of pairs of tokens are (i, j)."""
    dtype: gl.constexpr = x_smem.dtype
    acc_t: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    acc_p: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, P, 16])
    acc_n: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    op_t: gl.constexpr = gl.DotOperandLayout(0, acc_t, 2)
    op_n: gl.constexpr = gl.DotOperandLayout(0, acc_n, 2)
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    rows_t: gl.constexpr = gl.SliceLayout(1, acc_t)
    cols_t: gl.constexpr = gl.SliceLayout(0, acc_t)
    rows_p: gl.constexpr = gl.SliceLayout(1, acc_p)
    offs_t = gl.arange(0, CHUNK, layout=line)
    offs_i = gl.arange(0, CHUNK, layout=rows_t)
    offs_k = gl.arange(0, CHUNK, layout=cols_t)
    offs_part = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, acc_n))[:, None] * N
    offs_part = part * (CHUNK * N) + offs_part + gl.arange(0, N, layout=gl.SliceLayout(0, acc_n))[None, :]
    B_tile = B_smem.reshape([CHUNK, N])
    C_tile = C_smem.reshape([CHUNK, N])
    before_smem.store(gl.where(offs_i[:, None] < offs_k[None, :], 1.0, 0.0).to(dtype))
    fence_async_shared()
    dC = gl.zeros([CHUNK, N], gl.float32, layout=acc_n)
    gdc_wait()
    if first > 0:  # what earlier blocks of heads have left
        dC = gl.load(dC_ptr + offs_part)
    decay = gl.load(decay_ptr + row * CHUNK + offs_t)
    step = gl.load(step_ptr + row * CHUNK + offs_t)
    mbarrier.wait(keys_full, 0)
    cb = gl.zeros([CHUNK, CHUNK], gl.float32, layout=acc_t)
    cb = warpgroup_mma(C_tile, B_tile.permute((1, 0)), cb, use_acc=False, is_async=True)
    cb = warpgroup_mma_wait(0, deps=[cb])
    cb = gl.where(offs_i[:, None] >= offs_k[None, :], cb, 0.0)
    dcb = gl.zeros([CHUNK, CHUNK], gl.float32, layout=acc_t)
    for i in range(count):
        stage = i % STAGES
        decay_smem.store(decay)
        shifted_smem.store(decay - gl.log2(step))
        barrier()
        mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), count=1, pred=i > 0)
        after = (row + min(i + 1, count - 1)) * CHUNK
        decay = gl.load(decay_ptr + after + offs_t)
        step = gl.load(step_ptr + after + offs_t)
        x_tile = x_smem.index(stage).reshape([CHUNK, P])
        dy_tile = dy_smem.index(stage).reshape([CHUNK, P])
        H_tile = H_smem.index(stage)
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        pairs = gl.zeros([CHUNK, CHUNK], gl.float32, layout=acc_t)
        pairs = warpgroup_mma(dy_tile, x_tile.permute((1, 0)), pairs, use_acc=False, is_async=True)
        y = gl.zeros([CHUNK, P], gl.float32, layout=acc_p)
        y = warpgroup_mma(C_tile, H_tile.permute((1, 0)), y, use_acc=False, is_async=True)
        grown = _exp2(gl.minimum(decay_smem.load(rows_t)[:, None] - shifted_smem.load(cols_t)[None, :], GREATEST))
        dy = dy_tile.load(acc_p).to(gl.float32) * _exp2(decay_smem.load(rows_p))[:, None]
        pairs = warpgroup_mma_wait(1, deps=[pairs])
        pairs = pairs * grown
        dcb += pairs
        # A product with a triangle of ones sums over the tokens before k; those from k on are summed in registers.
        crossing = gl.zeros([CHUNK, CHUNK], gl.float32, layout=acc_t)
        crossing = warpgroup_mma(gl.convert_layout((pairs * cb).to(dtype), op_t), before_smem, crossing,
                                 use_acc=False, is_async=True)  # fmt: skip
        y = warpgroup_mma_wait(1, deps=[y])
        reads = gl.convert_layout(gl.sum(y * dy, 1), rows_t)
        dC = warpgroup_mma(gl.convert_layout(dy.to(dtype), op_n), H_tile, dC, is_async=True)
        crossing = warpgroup_mma_wait(1, deps=[crossing])
        late = gl.where(offs_i[:, None] >= offs_k[None, :], crossing + reads[:, None], 0.0)
        gl.store(late_ptr + (row + i) * CHUNK + offs_k, gl.sum(late, 0))
        dC = warpgroup_mma_wait(0, deps=[dC])
    dcb = gl.where(offs_i[:, None] >= offs_k[None, :], dcb, 0.0).to(dtype)
    dcb_smem.store(dcb)
    fence_async_shared()
    barrier()
    mbarrier.arrive(dcb_full, count=1)
    dC = warpgroup_mma(gl.convert_layout(dcb, op_n), B_tile, dC, is_async=True)
    dC = warpgroup_mma_wait(0, deps=[dC])
    gl.store(dC_ptr + offs_part, dC)


@gluon.jit
def _ssd_bwd_walk_hopper_kernel(
    x_desc, dy_desc, H_desc, K_desc, B_desc, C_desc, dx_desc,
    decay_ptr, step_ptr, D_ptr, dB_ptr, dC_ptr, late_ptr, kept_ptr, direct_ptr, skip_ptr, through_ptr, sums_ptr,
    nchunks, nheads, ngroups, first, held, split_heads, columns, stride_D_h, stride_D_p,
    CHUNK: gl.constexpr, P: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, D_CHANNELS: gl.constexpr,
):  # fmt: skip
    """Grid (batch * chunks, groups * splits): a program owns one chunk of some heads of one group.

    Reads x, dy and both states of each head once, writes dx, and sums dB and dC over its heads (float32).
    """
    pid_c = gl.program_id(0)
    nsplits = gl.num_programs(1) // ngroups
    pid_g = gl.program_id(1) // nsplits
    pid_s = gl.program_id(1) % nsplits
    pid_b = pid_c // nchunks
    start = (pid_c % nchunks) * CHUNK
    heads = nheads // ngroups
    begin = pid_s * split_heads
    count = min(split_heads, held - begin)
    pid_h = pid_g * heads + first + begin
    row = pid_c.to(gl.int64) * nheads + pid_h
    part = (pid_s * gl.num_programs(0) + pid_c).to(gl.int64) * ngroups + pid_g
    place = (pid_c * ngroups + pid_g) * held + begin
    dtype: gl.constexpr = x_desc.dtype
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    pairs: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    x_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, P], x_desc.layout)
    dy_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, P], dy_desc.layout)
    H_smem = gl.allocate_shared_memory(dtype, [STAGES, P, N], H_desc.layout)
    K_smem = gl.allocate_shared_memory(dtype, [STAGES, P, N], K_desc.layout)
    B_smem = gl.allocate_shared_memory(dtype, [1, CHUNK, N], B_desc.layout)
    C_smem = gl.allocate_shared_memory(dtype, [1, CHUNK, N], C_desc.layout)
    dx_smem = gl.allocate_shared_memory(dtype, [1, CHUNK, P], dx_desc.layout)
    dcb_smem = gl.allocate_shared_memory(dtype, [CHUNK, CHUNK], pairs)
    before_smem = gl.allocate_shared_memory(dtype, [CHUNK, CHUNK], pairs)
    vectors = gl.allocate_shared_memory(gl.float32, [4, CHUNK], vector)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    once = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
        if i < 2:
            mbarrier.init(once.index(i), count=1)
    # The copy engine counts on these barriers: it has to see them set up.
    fence_async_shared()
    gl.warp_specialize(
        [
            (_walk_queries, (
                x_smem, dy_smem, H_smem, B_smem, C_smem, dcb_smem, before_smem, vectors.index(0), vectors.index(1),
                full, empty, once.index(0), once.index(1), decay_ptr, step_ptr, dC_ptr, late_ptr, row, part, count,
                first, CHUNK, P, N, STAGES,
            )),
            (_walk_keys, (
                dx_desc, x_smem, dy_smem, H_smem, K_smem, B_smem, C_smem, dx_smem, dcb_smem, vectors.index(2),
                vectors.index(3), full, empty, once.index(0), once.index(1), decay_ptr, step_ptr, D_ptr, dB_ptr,
                kept_ptr, direct_ptr, skip_ptr, through_ptr, sums_ptr + pid_c.to(gl.int64) * columns + 2 * nheads,
                pid_b, pid_h, start, row, part, count, first, nheads, columns, stride_D_h, stride_D_p,
                CHUNK, P, N, STAGES, D_CHANNELS,
            )),
            (_fetch_heads, (
                x_desc, dy_desc, H_desc, K_desc, B_desc, C_desc, x_smem, dy_smem, H_smem, K_smem, B_smem, C_smem,
                full, empty, once.index(0), pid_b, pid_g, pid_h, start, place, count, CHUNK, P, N, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
