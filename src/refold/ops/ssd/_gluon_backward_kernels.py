"""The two heavy kernels of the SSD backward pass written for Hopper: copy engine, asynchronous products, warp roles.

The first replaces `_ssd_bwd_states_kernel`. The second replaces `_ssd_bwd_keys_kernel` and `_ssd_bwd_queries_kernel`:
one warp group does the work of each, on the same tiles, which one warp loads. They are used for 16-bit inputs, chunks
of 64 tokens, 64 channels per head and 64 or 128 states.
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

from refold.ops.triton.gluon import barrier, exp2, load_tile, store_tile

# Which heads a launch takes: see `_triton_backward_kernels`.
UNSPECIALIZED = ("first", "held", "split_heads")

# Of decays between tokens of a chunk: what lies above the diagonal has to stay finite.
GREATEST = gl.constexpr(96.0)


# States and their gradients ---------------------------------------------------------------------------------------


@gluon.jit
def _fetch_chunks(
    x_desc, dy_desc, B_desc, C_desc, tile_smem, key_smem, full, empty, reverse, pid_b, pid_h, key_at, nchunks,
    CHUNK: gl.constexpr, P: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: fills a stage of shared memory a chunk."""
    gdc_wait()
    for i in range(nchunks):
        stage = i % STAGES
        mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
        bar = full.index(stage)
        mbarrier.expect(bar, CHUNK * (P + BLOCK_N) * 2)
        if reverse != 0:
            start = (nchunks - 1 - i) * CHUNK
            load_tile(dy_desc, [pid_b, start, pid_h * P], bar, tile_smem.index(stage))
            load_tile(C_desc, [pid_b, start, key_at], bar, key_smem.index(stage))
        else:
            load_tile(x_desc, [pid_b, i * CHUNK, pid_h * P], bar, tile_smem.index(stage))
            load_tile(B_desc, [pid_b, i * CHUNK, key_at], bar, key_smem.index(stage))


@gluon.jit
def _walk_chunks(
    H_desc, K_desc, tile_smem, key_smem, state_smem, weight_smem, full, empty, decay_ptr, step_ptr, initial_ptr,
    dfinal_ptr, dinitial_ptr, reverse, pid_b, pid_h, pid_r, nheads, heads, nchunks, first_n,
    CHUNK: gl.constexpr, P: gl.constexpr, N: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp group: a state, or its gradient (P x BLOCK_N, float32), from chunk to chunk."""
    dtype: gl.constexpr = tile_smem.dtype
    acc_h: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    op_h: gl.constexpr = gl.DotOperandLayout(0, acc_h, 2)
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    offs_p = gl.arange(0, P, layout=gl.SliceLayout(1, acc_h))
    offs_n = first_n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, acc_h))
    offs_pn = offs_p[:, None] * N + offs_n[None, :]
    offs_t = gl.arange(0, CHUNK, layout=line)
    head = (pid_b.to(gl.int64) * nheads + pid_h) * (P * N)
    state = gl.zeros([P, BLOCK_N], gl.float32, layout=acc_h)
    gdc_wait()
    if reverse != 0:
        if dfinal_ptr is not None:
            state = gl.load(dfinal_ptr + head + offs_pn).to(gl.float32)
    else:
        if initial_ptr is not None:
            state = gl.load(initial_ptr + head + offs_pn).to(gl.float32)
    chunk = reverse * (nchunks - 1)
    row = ((pid_b * nchunks + chunk).to(gl.int64) * nheads + pid_h) * CHUNK
    decay = gl.load(decay_ptr + row + offs_t)
    step = gl.load(step_ptr + row + offs_t)
    last = gl.load(decay_ptr + row + CHUNK - 1)
    for i in range(nchunks):
        stage = i % STAGES
        weight = gl.where(reverse != 0, decay, last - decay)
        weight_smem.store(exp2(weight) * gl.where(reverse != 0, 1.0, step))
        whole = exp2(last)
        tma.store_wait(1)
        # Every warp has waited for the products of the last chunk, and the copy of the one before it has left.
        barrier()
        mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), count=1, pred=i > 0)
        state_smem.index(i % 2).store(state.to(dtype))
        fence_async_shared()
        barrier()
        place = ((pid_b * nchunks + chunk) * heads + pid_r) * P
        if reverse != 0:
            store_tile(K_desc, [place, first_n], state_smem.index(i % 2))
        else:
            store_tile(H_desc, [place, first_n], state_smem.index(i % 2))
        after = min(i + 1, nchunks - 1)
        chunk = after + reverse * (nchunks - 1 - 2 * after)
        row = ((pid_b * nchunks + chunk).to(gl.int64) * nheads + pid_h) * CHUNK
        decay = gl.load(decay_ptr + row + offs_t)
        step = gl.load(step_ptr + row + offs_t)
        last = gl.load(decay_ptr + row + CHUNK - 1)
        state = state * whole
        weights = weight_smem.load(gl.SliceLayout(0, op_h))
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        tile = tile_smem.index(stage).reshape([CHUNK, P]).permute((1, 0)).load(op_h)
        weighted = (tile.to(gl.float32) * weights[None, :]).to(dtype)
        state = warpgroup_mma(weighted, key_smem.index(stage).reshape([CHUNK, BLOCK_N]), state, is_async=True)
        state = warpgroup_mma_wait(0, deps=[state])
    if dinitial_ptr is not None:  # noqa: SIM102 (a constant, then a value)
        if reverse != 0:
            gl.store(dinitial_ptr + head + offs_pn, state)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def _ssd_bwd_states_hopper_kernel(
    x_desc, dy_desc, B_desc, C_desc, H_desc, K_desc, decay_ptr, step_ptr, initial_ptr, dfinal_ptr, dinitial_ptr,
    nchunks, nheads, ngroups, first, held,
    CHUNK: gl.constexpr, P: gl.constexpr, N: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Grid (2 * blocks of states * heads of the block, batch): a program walks one head in one direction of time.

    As `_ssd_bwd_states_kernel`; states leave through the copy engine, in 16 bits.
    """
    reverse = gl.program_id(0) % 2
    blocks_n: gl.constexpr = N // BLOCK_N
    first_n = gl.program_id(0) // 2 % blocks_n * BLOCK_N
    pid_r = gl.program_id(0) // 2 // blocks_n
    pid_b = gl.program_id(1)
    pid_g = pid_r // held
    pid_h = pid_g * (nheads // ngroups) + first + pid_r % held
    dtype: gl.constexpr = x_desc.dtype
    tile_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, P], x_desc.layout)
    key_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, BLOCK_N], B_desc.layout)
    state_smem = gl.allocate_shared_memory(dtype, [2, P, BLOCK_N], H_desc.layout)
    weight_smem = gl.allocate_shared_memory(gl.float32, [CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    # The copy engine counts on these barriers: it has to see them set up.
    fence_async_shared()
    gl.warp_specialize(
        [
            (_walk_chunks, (
                H_desc, K_desc, tile_smem, key_smem, state_smem, weight_smem, full, empty, decay_ptr, step_ptr,
                initial_ptr, dfinal_ptr, dinitial_ptr, reverse, pid_b, pid_h, pid_r, nheads, ngroups * held, nchunks,
                first_n, CHUNK, P, N, BLOCK_N, STAGES,
            )),
            (_fetch_chunks, (
                x_desc, dy_desc, B_desc, C_desc, tile_smem, key_smem, full, empty, reverse, pid_b, pid_h,
                pid_g * N + first_n, nchunks, CHUNK, P, BLOCK_N, STAGES,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip


# Gradients of tokens ----------------------------------------------------------------------------------------------


@gluon.jit
def _fetch_heads(
    x_desc, dy_desc, H_desc, K_desc, B_desc, C_desc, x_smem, dy_smem, H_smem, K_smem, B_smem, C_smem,
    full, empty, keys_full, pid_b, pid_g, pid_h, start, place, count,
    CHUNK: gl.constexpr, P: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: load B and C of the chunk, then fill one stage of shared memory per head."""
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
def _add_part(out, values, first, flag, CHUNK: gl.constexpr, N: gl.constexpr):
    """Write dB or dC of this block of heads onto what earlier blocks have left.

    Not where anything is not finite: the flag tells `_ssd_bwd_exact_kernel` to do so.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    offs = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, layout))[:, None] * N
    offs = offs + gl.arange(0, N, layout=gl.SliceLayout(0, layout))[None, :]
    if first > 0:
        values += gl.load(out + offs)
    bad = gl.max(gl.max(gl.where(gl.abs(values) < float("inf"), 0, 1), 1), 0)
    gl.store(flag, bad)
    gl.store(out + offs, values, mask=(offs * 0 + bad) == 0)


@gluon.jit
def _walk_keys(
    dx_desc, x_smem, dy_smem, H_smem, K_smem, B_smem, C_smem, dx_smem, dcb_smem, cb_smem, decay_smem, step_smem,
    full, empty, keys_full, dcb_full, decay_ptr, step_ptr, D_ptr, dB_ptr, kept_ptr, direct_ptr, skip_ptr,
    through_ptr, sums_ptr, flag, pid_b, pid_h, start, row, part, count, first, stride_D_h, stride_D_p,
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
    B_tile = B_smem.reshape([CHUNK, N])
    C_tile = C_smem.reshape([CHUNK, N])
    dB = gl.zeros([CHUNK, N], gl.float32, layout=acc_n)
    gdc_wait()
    decay = gl.load(decay_ptr + row * CHUNK + offs_t)
    step = gl.load(step_ptr + row * CHUNK + offs_t)
    last = gl.load(decay_ptr + row * CHUNK + CHUNK - 1)
    mbarrier.wait(keys_full, 0)
    cb = gl.zeros([CHUNK, CHUNK], gl.float32, layout=acc_t)
    cb = warpgroup_mma(B_tile, C_tile.permute((1, 0)), cb, use_acc=False, is_async=True)
    cb = warpgroup_mma_wait(0, deps=[cb])
    causal = gl.arange(0, CHUNK, layout=rows_t)[:, None] <= gl.arange(0, CHUNK, layout=cols_t)[None, :]
    cb_smem.store(gl.where(causal, cb, 0.0))
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
        if D_ptr is not None:
            D = gl.load(D_ptr + (pid_h + i) * stride_D_h + (offs_p * stride_D_p if D_CHANNELS else 0)).to(gl.float32)
        x_tile = x_smem.index(stage).reshape([CHUNK, P])
        dy_tile = dy_smem.index(stage).reshape([CHUNK, P])
        K_tile = K_smem.index(stage)
        H_tile = H_smem.index(stage)
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        dX = gl.zeros([CHUNK, P], gl.float32, layout=acc_p)
        dX = warpgroup_mma(B_tile, K_tile.permute((1, 0)), dX, use_acc=False, is_async=True)
        # Meanwhile the decayed C·Bᵀ of the chunk, and <H, K>.
        grown = exp2(gl.minimum(decay_smem.load(cols_t)[None, :] - decay_smem.load(rows_t)[:, None], GREATEST))
        mix = gl.convert_layout((cb_smem.load(acc_t) * grown).to(dtype), op_p)
        to_end = exp2(to_last - decay_smem.load(rows_p))
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
        gl.store(through_ptr + (row + i) * 16 + offs_16, gl.sum(both, 1) * exp2(to_last))
        dX = warpgroup_mma_wait(1, deps=[dX])
        gl.store(kept_ptr + at + offs_out, kept * steps)
        gl.store(direct_ptr + at + offs_out, gl.sum(dX * x_wide, 1))
        dx = dX * steps[:, None]
        if D_ptr is not None:
            dy = dy_tile.load(acc_p).to(gl.float32)
            if D_CHANNELS:
                dx += D[None, :] * dy
                gl.store(sums_ptr + (pid_h + i) * P + offs_p, gl.sum(dy * x_wide, 0))
            else:
                dx += D * dy
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
    _add_part(dB_ptr + part * (CHUNK * N), dB, first, flag, CHUNK, N)
    tma.store_wait(0)


@gluon.jit
def _walk_queries(
    x_smem, dy_smem, H_smem, B_smem, C_smem, dcb_smem, before_smem, cb_smem, decay_smem, shifted_smem,
    full, empty, keys_full, dcb_full, decay_ptr, step_ptr, dC_ptr, late_ptr, flag, row, part, count, first,
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
    B_tile = B_smem.reshape([CHUNK, N])
    C_tile = C_smem.reshape([CHUNK, N])
    before_smem.store(gl.where(offs_i[:, None] < offs_k[None, :], 1.0, 0.0).to(dtype))
    fence_async_shared()
    dC = gl.zeros([CHUNK, N], gl.float32, layout=acc_n)
    gdc_wait()
    decay = gl.load(decay_ptr + row * CHUNK + offs_t)
    step = gl.load(step_ptr + row * CHUNK + offs_t)
    mbarrier.wait(keys_full, 0)
    cb = gl.zeros([CHUNK, CHUNK], gl.float32, layout=acc_t)
    cb = warpgroup_mma(C_tile, B_tile.permute((1, 0)), cb, use_acc=False, is_async=True)
    cb = warpgroup_mma_wait(0, deps=[cb])
    cb_smem.store(gl.where(offs_i[:, None] >= offs_k[None, :], cb, 0.0))
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
        grown = exp2(gl.minimum(decay_smem.load(rows_t)[:, None] - shifted_smem.load(cols_t)[None, :], GREATEST))
        pairs = warpgroup_mma_wait(1, deps=[pairs])
        pairs = pairs * grown
        dcb += pairs
        # A product with a triangle of ones sums over the tokens before k; those from k on are summed in registers.
        crossing = gl.zeros([CHUNK, CHUNK], gl.float32, layout=acc_t)
        mixed = gl.convert_layout((pairs * cb_smem.load(acc_t)).to(dtype), op_t)
        crossing = warpgroup_mma(mixed, before_smem, crossing, use_acc=False, is_async=True)
        y = warpgroup_mma_wait(1, deps=[y])
        dy = dy_tile.load(acc_p).to(gl.float32) * exp2(decay_smem.load(rows_p))[:, None]
        reads = gl.convert_layout(gl.sum(y * dy, 1), rows_t)
        dC = warpgroup_mma(gl.convert_layout(dy.to(dtype), op_n), H_tile, dC, is_async=True)
        crossing = warpgroup_mma_wait(1, deps=[crossing])
        # Compared anew for each head: 32 predicates kept over the loop would cost registers that products need.
        zero = gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r,r", [offs_k], gl.int32, False, 1)
        late = gl.where(offs_i[:, None] >= (offs_k + zero)[None, :], crossing + reads[:, None], 0.0)
        gl.store(late_ptr + (row + i) * CHUNK + offs_t, gl.convert_layout(gl.sum(late, 0), line))
        dC = warpgroup_mma_wait(0, deps=[dC])
    dcb = gl.where(offs_i[:, None] >= offs_k[None, :], dcb, 0.0).to(dtype)
    dcb_smem.store(dcb)
    fence_async_shared()
    barrier()
    mbarrier.arrive(dcb_full, count=1)
    dC = warpgroup_mma(gl.convert_layout(dcb, op_n), B_tile, dC, is_async=True)
    dC = warpgroup_mma_wait(0, deps=[dC])
    _add_part(dC_ptr + part * (CHUNK * N), dC, first, flag + 1, CHUNK, N)


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def _ssd_bwd_walk_hopper_kernel(
    x_desc, dy_desc, H_desc, K_desc, B_desc, C_desc, dx_desc,
    decay_ptr, step_ptr, D_ptr, dB_ptr, dC_ptr, late_ptr, kept_ptr, direct_ptr, skip_ptr, through_ptr, sums_ptr,
    flags_ptr,
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
    flag = flags_ptr + 2 * (pid_c.to(gl.int64) * gl.num_programs(1) + gl.program_id(1))
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
    # Two neighbours of a row per thread: four rows use all banks.
    values: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    cb_smem = gl.allocate_shared_memory(gl.float32, [2, CHUNK, CHUNK], values)
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
                x_smem, dy_smem, H_smem, B_smem, C_smem, dcb_smem, before_smem, cb_smem.index(0), vectors.index(0),
                vectors.index(1), full, empty, once.index(0), once.index(1), decay_ptr, step_ptr, dC_ptr, late_ptr,
                flag, row, part, count, first, CHUNK, P, N, STAGES,
            )),
            (_walk_keys, (
                dx_desc, x_smem, dy_smem, H_smem, K_smem, B_smem, C_smem, dx_smem, dcb_smem, cb_smem.index(1),
                vectors.index(2), vectors.index(3), full, empty, once.index(0), once.index(1), decay_ptr, step_ptr,
                D_ptr, dB_ptr, kept_ptr, direct_ptr, skip_ptr, through_ptr,
                sums_ptr + pid_c.to(gl.int64) * columns + 2 * nheads, flag, pid_b, pid_h, start, row, part, count,
                first, stride_D_h, stride_D_p, CHUNK, P, N, STAGES, D_CHANNELS,
            )),
            (_fetch_heads, (
                x_desc, dy_desc, H_desc, K_desc, B_desc, C_desc, x_smem, dy_smem, H_smem, K_smem, B_smem, C_smem,
                full, empty, once.index(0), pid_b, pid_g, pid_h, start, place, count, CHUNK, P, N, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
