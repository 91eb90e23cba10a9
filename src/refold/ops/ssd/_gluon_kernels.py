"""The two heavy kernels of the SSD forward pass written for Hopper: copy engine, asynchronous products, warp roles.

They replace `_ssd_fwd_state_kernel` and `_ssd_fwd_scan_kernel` for 16-bit inputs and at most 256 states. The channels
of a head are cut into tiles of P = 64, and more than 128 states into HALVES of N = 128. Where a tile is incomplete, the
copy engine reads zeros and writes nothing. Neighbouring tiles of a group (of one head or of several) share a program,
so B, C and C·Bᵀ are loaded once for all of them.

`prepare` writes ``shifted`` = decay - log2(step), not step, so that decay and step of a pair of tokens are one exp2. If
steps may be negative (SIGNED), the last bit of it is their sign. `prepare` writes C·Bᵀ with zeros above its diagonal;
with OWN_CB, where no other tile reads it, `scan` forms it. Both kernels start while the kernel before them ends
(``gdc_launch_dependents``). They load inputs at once, and wait for that kernel's results (``gdc_wait``).
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

from refold.ops.triton.gluon import barrier, exp2, load_tile, seen_as, silu, store_tile


@gluon.jit
def _weight(exponent, shifted, SIGNED: gl.constexpr):
    """2**exponent; with the sign of the step that ``shifted`` holds, if steps have signs."""
    weight = exp2(exponent)
    if SIGNED:
        sign = shifted.to(gl.int32, bitcast=True) << 31
        weight = (weight.to(gl.int32, bitcast=True) ^ sign).to(gl.float32, bitcast=True)
    return weight


# The state after a piece -------------------------------------------------------------------------------------------


@gluon.jit
def _state_offsets(tile, half, acc_h: gl.constexpr, HEADDIM: gl.constexpr, DSTATE: gl.constexpr, P: gl.constexpr,
                   N: gl.constexpr):  # fmt: skip
    """Return the offsets of a tile in the state of its head, and which elements are inside the state."""
    offs_p = tile % _blocks(HEADDIM, P) * P + gl.arange(0, P, layout=gl.SliceLayout(1, acc_h))
    offs_n = half * N + gl.arange(0, N, layout=gl.SliceLayout(0, acc_h))
    return offs_p[:, None] * DSTATE + offs_n[None, :], (offs_p < HEADDIM)[:, None] & (offs_n < DSTATE)[None, :]


@gluon.constexpr_function
def _blocks(size, block):
    """Return how many tiles cover a head."""
    return -(-size // block)


@gluon.jit
def _fetch_state(
    given, HEADDIM: gl.constexpr, DSTATE: gl.constexpr, TILES: gl.constexpr, HALVES: gl.constexpr, CHUNK: gl.constexpr,
    P: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, SIGNED: gl.constexpr,
):  # fmt: skip
    """One warp: fills a stage of shared memory a chunk, from the last chunk to the first."""
    (
        x_desc, B_desc, x_smem, B_smem, full, empty, pid_b, pid_t, pid_g, end, count,
    ) = given  # fmt: skip
    blocks: gl.constexpr = _blocks(HEADDIM, P)
    for i in range(count):
        stage = i % STAGES
        mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
        bar = full.index(stage)
        mbarrier.expect(bar, CHUNK * (TILES * P + HALVES * N) * 2)
        start = (end - 1 - i) * CHUNK
        for half in gl.static_range(HALVES):
            load_tile(B_desc, [pid_b, pid_g, start, half * N], bar, B_smem.index(stage * HALVES + half))
        for which in gl.static_range(TILES):
            tile = pid_t + which
            x_tile = x_smem.index(stage * TILES + which)
            load_tile(x_desc, [pid_b, tile // blocks, start, tile % blocks * P], bar, x_tile)


@gluon.jit
def _sum_state(
    given, UNIT: gl.constexpr, HEADDIM: gl.constexpr, DSTATE: gl.constexpr, TILES: gl.constexpr, HALVES: gl.constexpr,
    CHUNK: gl.constexpr, P: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, SIGNED: gl.constexpr,
):  # fmt: skip
    """One warp group: one tile of a state. From the last chunk to the first no running state has to be decayed."""
    (
        x_smem, B_smem, weight_smem, full, empty, decay_ptr, shifted_ptr, state_ptr, total_ptr,
        pid_b, pid_s, pid_t, end, count, nchunks, npieces, nheads,
    ) = given  # fmt: skip
    acc_h: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    op_h: gl.constexpr = gl.DotOperandLayout(0, acc_h, 2)
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    WHICH: gl.constexpr = UNIT // HALVES
    HALF: gl.constexpr = UNIT % HALVES
    tile = pid_t + WHICH
    pid_h = tile // _blocks(HEADDIM, P)
    offs_t = gl.arange(0, CHUNK, layout=line)
    row = ((pid_b * nchunks + end - 1).to(gl.int64) * nheads + pid_h) * CHUNK
    gdc_wait()
    shifted = gl.load(shifted_ptr + row + offs_t)
    last = gl.load(decay_ptr + row + CHUNK - 1)
    total = last * 0.0
    state = gl.zeros([P, N], gl.float32, layout=acc_h)
    for i in range(count):
        stage = i % STAGES
        total += last
        weight_smem.index(UNIT).store(_weight(total - shifted, shifted, SIGNED))
        row = ((pid_b * nchunks + end - 1 - min(i + 1, count - 1)).to(gl.int64) * nheads + pid_h) * CHUNK
        shifted = gl.load(shifted_ptr + row + offs_t)
        last = gl.load(decay_ptr + row + CHUNK - 1)
        barrier()
        # Every warp has waited for the products of the last chunk: its tiles are free.
        mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), count=1, pred=i > 0)
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        weight = weight_smem.index(UNIT).load(gl.SliceLayout(0, op_h))
        x_tile = x_smem.index(stage * TILES + WHICH).reshape([CHUNK, P]).permute((1, 0)).load(op_h)
        x_weighted = (x_tile.to(gl.float32) * weight[None, :]).to(x_smem.dtype)
        B_tile = B_smem.index(stage * HALVES + HALF).reshape([CHUNK, N])
        # Waited for at once: of a sum in flight over the end of a loop, ptxas runs every product alone.
        state = warpgroup_mma(x_weighted, B_tile, state, is_async=True)
        state = warpgroup_mma_wait(0, deps=[state])
    offs, inside = _state_offsets(tile, HALF, acc_h, HEADDIM, DSTATE, P, N)
    piece = (pid_b * npieces + pid_s).to(gl.int64) * nheads + pid_h
    gl.store(state_ptr + piece * (HEADDIM * DSTATE) + offs, state, mask=inside)
    gl.store(total_ptr + piece, total)


@gluon.jit
def _ssd_fwd_state_hopper_kernel(
    x_desc, B_desc, decay_ptr, shifted_ptr, state_ptr, total_ptr, nchunks, piece_chunks, npieces, nheads, ngroups,
    HEADDIM: gl.constexpr, DSTATE: gl.constexpr, TILES: gl.constexpr, HALVES: gl.constexpr, CHUNK: gl.constexpr,
    P: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, SIGNED: gl.constexpr,
):  # fmt: skip
    """Grid (tiles of all heads / TILES, pieces, batch): a program owns one piece of TILES neighbouring tiles.

    Reads x and B of the piece once, writes the state after it (float32) and its log2 decay: a warp group for
    each tile and half (1, 2 or 4 of them). Ragged ends of the time axis are cut by the copy engine.
    """
    gdc_launch_dependents()
    pid_t = gl.program_id(0) * TILES
    pid_s = gl.program_id(1)
    pid_b = gl.program_id(2)
    pid_g = pid_t // (nheads // ngroups * _blocks(HEADDIM, P))
    count = min(piece_chunks, nchunks - pid_s * piece_chunks)
    end = pid_s * piece_chunks + count
    dtype: gl.constexpr = x_desc.dtype
    x_smem = gl.allocate_shared_memory(dtype, [STAGES * TILES, 1, 1, CHUNK, P], x_desc.layout)
    B_smem = gl.allocate_shared_memory(dtype, [STAGES * HALVES, 1, 1, CHUNK, N], B_desc.layout)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    weight_smem = gl.allocate_shared_memory(gl.float32, [TILES * HALVES, CHUNK], vector)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=TILES * HALVES)
    # The copy engine counts on these barriers: it has to see them set up.
    fence_async_shared()
    sums = (
        x_smem, B_smem, weight_smem, full, empty, decay_ptr, shifted_ptr, state_ptr, total_ptr,
        pid_b, pid_s, pid_t, end, count, nchunks, npieces, nheads,
    )  # fmt: skip
    fetch = (x_desc, B_desc, x_smem, B_smem, full, empty, pid_b, pid_t, pid_g, end, count)
    if TILES * HALVES == 4:
        gl.warp_specialize(
            [
                (_sum_state, (sums, 0, HEADDIM, DSTATE, TILES, HALVES, CHUNK, P, N, STAGES, SIGNED)),
                (_sum_state, (sums, 1, HEADDIM, DSTATE, TILES, HALVES, CHUNK, P, N, STAGES, SIGNED)),
                (_sum_state, (sums, 2, HEADDIM, DSTATE, TILES, HALVES, CHUNK, P, N, STAGES, SIGNED)),
                (_sum_state, (sums, 3, HEADDIM, DSTATE, TILES, HALVES, CHUNK, P, N, STAGES, SIGNED)),
                (_fetch_state, (fetch, HEADDIM, DSTATE, TILES, HALVES, CHUNK, P, N, STAGES, SIGNED)),
            ],
            [4, 4, 4, 1],
            [112, 112, 112, 24],
        )
    elif TILES * HALVES == 2:
        gl.warp_specialize(
            [
                (_sum_state, (sums, 0, HEADDIM, DSTATE, TILES, HALVES, CHUNK, P, N, STAGES, SIGNED)),
                (_sum_state, (sums, 1, HEADDIM, DSTATE, TILES, HALVES, CHUNK, P, N, STAGES, SIGNED)),
                (_fetch_state, (fetch, HEADDIM, DSTATE, TILES, HALVES, CHUNK, P, N, STAGES, SIGNED)),
            ],
            [4, 1],
            [208, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_sum_state, (sums, 0, HEADDIM, DSTATE, TILES, HALVES, CHUNK, P, N, STAGES, SIGNED)),
                (_fetch_state, (fetch, HEADDIM, DSTATE, TILES, HALVES, CHUNK, P, N, STAGES, SIGNED)),
            ],
            [1],
            [24],
        )


# The scan -----------------------------------------------------------------------------------------------------------


@gluon.jit
def _fetch_scan(
    given, HEADDIM: gl.constexpr, DSTATE: gl.constexpr, TILES: gl.constexpr, HALVES: gl.constexpr, CHUNK: gl.constexpr,
    P: gl.constexpr, N: gl.constexpr, PASSED: gl.constexpr, HAS_Z: gl.constexpr, STAGES: gl.constexpr,
    OWN_CB: gl.constexpr, SIGNED: gl.constexpr, HAS_INITIAL: gl.constexpr,
):  # fmt: skip
    """One warp: fills one of the stages of shared memory a chunk, as soon as all warp groups are done with it."""
    (
        x_desc, z_desc, B_desc, C_desc, cb_desc, x_smem, z_smem, B_smem, C_smem, cb_smem, full, summed, read,
        z_full, z_empty, pid_b, pid_t, pid_g, first, count, nchunks, ngroups,
    ) = given  # fmt: skip
    blocks: gl.constexpr = _blocks(HEADDIM, P)
    for i in range(count):
        stage = i % STAGES
        for which in gl.static_range(TILES):
            mbarrier.wait(read.index(which * STAGES + stage), ((i // STAGES) & 1) ^ 1)
            mbarrier.wait(summed.index(which * STAGES + stage), ((i // STAGES) & 1) ^ 1)
        bar = full.index(stage)
        cb_bytes: gl.constexpr = 0 if OWN_CB else CHUNK * CHUNK * 4
        mbarrier.expect(bar, CHUNK * (TILES * P + 2 * HALVES * N) * 2 + cb_bytes)
        chunk = first + i
        start = chunk * CHUNK
        for which in gl.static_range(TILES):
            tile = pid_t + which
            x_tile = x_smem.index(stage * TILES + which)
            load_tile(x_desc, [pid_b, tile // blocks, start, tile % blocks * P], bar, x_tile)
        for half in gl.static_range(HALVES):
            load_tile(B_desc, [pid_b, pid_g, start, half * N], bar, B_smem.index(stage * HALVES + half))
            load_tile(C_desc, [pid_b, pid_g, start, half * N], bar, C_smem.index(stage * HALVES + half))
        if not OWN_CB:
            row = ((pid_b * nchunks + chunk) * ngroups + pid_g) * CHUNK
            if i == 0:
                gdc_wait()
            load_tile(cb_desc, [row, 0], bar, cb_smem.index(stage))
        if HAS_Z:
            for which in gl.static_range(TILES):
                tile = pid_t + which
                mbarrier.wait(z_empty.index(which), (i & 1) ^ 1)
                z_bar = z_full.index(which)
                mbarrier.expect(z_bar, CHUNK * P * 2)
                load_tile(z_desc, [pid_b, tile // blocks, start, tile % blocks * P], z_bar, z_smem.index(which))


@gluon.jit
def _one_column(state):
    """Return four neighbouring columns of a tile of a state, one from each lane of a row: no data moves."""
    for _ in gl.static_range(8):
        if state.shape[1] > 8:
            state, _ = gl.split(state.reshape([state.shape[0], 2, state.shape[1] // 2]).permute((0, 2, 1)))
    return gl.split(state.reshape([state.shape[0], 4, 2]))[0]


@gluon.jit
def _walk_state(
    given, UNIT: gl.constexpr, HEADDIM: gl.constexpr, DSTATE: gl.constexpr, TILES: gl.constexpr, HALVES: gl.constexpr,
    CHUNK: gl.constexpr, P: gl.constexpr, N: gl.constexpr, PASSED: gl.constexpr, HAS_Z: gl.constexpr,
    STAGES: gl.constexpr, OWN_CB: gl.constexpr, SIGNED: gl.constexpr, HAS_INITIAL: gl.constexpr,
):  # fmt: skip
    """One warp group: one tile of a state (float32) from chunk to chunk; a 16-bit copy of it goes to `_walk_y`.

    After each chunk it says whether the state is finite: what is not finite in x makes every state of its channel so.
    """
    (
        x_smem, B_smem, state_smem, initial_smem, weight_smem, verdict_smem, full, published, summed, read,
        initial_full, decay_ptr, shifted_ptr, initial_ptr, piece_state_ptr, piece_decay_ptr, final_ptr,
        pid_b, pid_s, pid_t, first, count, nchunks, nsegments, segment_pieces, npieces, nheads,
    ) = given  # fmt: skip
    dtype: gl.constexpr = x_smem.dtype
    acc_h: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    op_h: gl.constexpr = gl.DotOperandLayout(0, acc_h, 2)
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    WHICH: gl.constexpr = UNIT // HALVES
    HALF: gl.constexpr = UNIT % HALVES
    COPIES: gl.constexpr = 2 // HALVES
    tile = pid_t + WHICH
    pid_h = tile // _blocks(HEADDIM, P)
    size: gl.constexpr = HEADDIM * DSTATE
    offs, inside = _state_offsets(tile, HALF, acc_h, HEADDIM, DSTATE, P, N)
    head = pid_b.to(gl.int64) * nheads + pid_h
    piece = pid_b.to(gl.int64) * npieces * nheads + pid_h
    before = pid_s * segment_pieces
    state = gl.zeros([P, N], gl.float32, layout=acc_h)
    if HAS_INITIAL:  # noqa: SIM102 (a constant, then a value)
        if (pid_s == 0) | (not PASSED):
            mbarrier.wait(initial_full.index(WHICH), 0)
            at: gl.constexpr = WHICH * (32 // initial_smem.dtype.primitive_bitwidth)
            state = initial_smem.index(at).reshape([P, N]).load(acc_h).to(gl.float32)
            barrier()  # Every warp has its part: copies of later states may take its place.
    if initial_ptr is not None:  # noqa: SIM102
        if (pid_s == 0) | (not PASSED):
            state = gl.load(initial_ptr + head * size + offs, mask=inside, other=0.0).to(gl.float32)
    gdc_wait()
    if PASSED:
        if pid_s > 0:
            state = gl.load(piece_state_ptr + (piece + (before - 1) * nheads) * size + offs, mask=inside, other=0.0)
    else:
        for s in range(before):
            own = gl.load(piece_state_ptr + (piece + s * nheads) * size + offs, mask=inside, other=0.0)
            state = state * exp2(gl.load(piece_decay_ptr + piece + s * nheads)) + own
    offs_t = gl.arange(0, CHUNK, layout=line)
    row = ((pid_b * nchunks + first).to(gl.int64) * nheads + pid_h) * CHUNK
    shifted = gl.load(shifted_ptr + row + offs_t)
    last = gl.load(decay_ptr + row + CHUNK - 1)
    for i in range(count):
        stage = i % STAGES
        weight_smem.index(UNIT).store(_weight(last - shifted, shifted, SIGNED))
        whole = exp2(last)
        row = ((pid_b * nchunks + first + min(i + 1, count - 1)).to(gl.int64) * nheads + pid_h) * CHUNK
        shifted = gl.load(shifted_ptr + row + offs_t)
        last = gl.load(decay_ptr + row + CHUNK - 1)
        # The copy of COPIES chunks ago has been read.
        j = i - COPIES
        mbarrier.wait(read.index(WHICH * STAGES + (j + STAGES) % STAGES), (j // STAGES) & 1, pred=j >= 0)
        state_smem.index(UNIT * COPIES + i % COPIES).store(state.to(dtype))
        fence_async_shared()
        # Every warp has waited for the products of the last chunk: its tiles are free, too.
        barrier()
        mbarrier.arrive(published.index(WHICH * STAGES + stage), count=1)
        state = state * whole
        weight = weight_smem.index(UNIT).load(gl.SliceLayout(0, op_h))
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        x_tile = x_smem.index(stage * TILES + WHICH).reshape([CHUNK, P]).permute((1, 0)).load(op_h)
        x_weighted = (x_tile.to(gl.float32) * weight[None, :]).to(dtype)
        B_tile = B_smem.index(stage * HALVES + HALF).reshape([CHUNK, N])
        state = warpgroup_mma(x_weighted, B_tile, state, is_async=True)
        state = warpgroup_mma_wait(0, deps=[state])
        if HALF == 0:
            # Zero, or NaN: a warp's rows are 16.
            verdict = gl.sum((_one_column(state) * 0.0).reshape([4, P]), 1)
            verdict_smem.index(WHICH * STAGES + stage).store(verdict)
        barrier()
        mbarrier.arrive(summed.index(WHICH * STAGES + stage), count=1)
    if pid_s == nsegments - 1:
        gl.store(final_ptr + head * size + offs, state.to(final_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def _load_products(cb_smem, stage, CHUNK: gl.constexpr, acc_y: gl.constexpr):
    """Return C·Bᵀ of a chunk from where `prepare` has put it: of a row, a thread's elements lie next to each other."""
    wide: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32], [8, 0]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [],
        [CHUNK, CHUNK],
    )  # fmt: skip
    cb = cb_smem.index(stage).load(wide).reshape([CHUNK, 2, 4, 2, 2, 2]).permute((0, 1, 3, 4, 2, 5))
    return gl.convert_layout(cb.reshape([CHUNK, CHUNK]), acc_y)


@gluon.jit
def _form_products(
    B_smem, C_smem, stage, HALVES: gl.constexpr, CHUNK: gl.constexpr, N: gl.constexpr, acc_y: gl.constexpr
):
    """Return C·Bᵀ of a chunk, also above the diagonal."""
    cb = gl.zeros([CHUNK, CHUNK], gl.float32, layout=acc_y)
    for half in gl.static_range(HALVES):
        C_tile = C_smem.index(stage * HALVES + half).reshape([CHUNK, N])
        B_tile = B_smem.index(stage * HALVES + half).reshape([CHUNK, N]).permute((1, 0))
        cb = warpgroup_mma(C_tile, B_tile, cb, use_acc=half > 0, is_async=True)
    return warpgroup_mma_wait(0, deps=[cb])


@gluon.jit
def _mixed(cb, decay_t, shifted_smem, WHICH: gl.constexpr, CHUNK: gl.constexpr, OWN_CB: gl.constexpr,
           SIGNED: gl.constexpr, acc_y: gl.constexpr, dtype: gl.constexpr):  # fmt: skip
    """Return the decayed C·Bᵀ of a chunk as the first factor of a product."""
    shifted_s = shifted_smem.index(WHICH).load(gl.SliceLayout(0, acc_y))
    exponent = decay_t[:, None] - shifted_s[None, :]
    if OWN_CB:
        offs_t = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, acc_y))
        offs_s = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, acc_y))
        mix = gl.where(offs_t[:, None] >= offs_s[None, :], cb * _weight(exponent, shifted_s[None, :], SIGNED), 0.0)
    else:
        # Above the diagonal C·Bᵀ is 0 and the exponent only has to stay finite.
        mix = cb * _weight(gl.minimum(exponent, 126.0), shifted_s[None, :], SIGNED)
    return gl.convert_layout(mix.to(dtype), gl.DotOperandLayout(0, acc_y, 2))


@gluon.jit
def _read_state(
    C_smem, state_smem, stage, copy, WHICH: gl.constexpr, HALVES: gl.constexpr, CHUNK: gl.constexpr, P: gl.constexpr,
    N: gl.constexpr, acc_y: gl.constexpr,
):  # fmt: skip
    """Start the product C·stateᵀ: what came before the chunk."""
    COPIES: gl.constexpr = 2 // HALVES
    y = gl.zeros([CHUNK, P], gl.float32, layout=acc_y)
    for half in gl.static_range(HALVES):
        C_tile = C_smem.index(stage * HALVES + half).reshape([CHUNK, N])
        state = state_smem.index((WHICH * HALVES + half) * COPIES + copy).permute((1, 0))
        y = warpgroup_mma(C_tile, state, y, use_acc=half > 0, is_async=True)
    return y


@gluon.jit
def _least(a, b):
    """Return the smaller one: `gl.min` would widen bytes, for whose exchange there is no more shared memory."""
    return gl.minimum(a, b)


@gluon.jit
def _walk_y(
    given, WHICH: gl.constexpr, HEADDIM: gl.constexpr, DSTATE: gl.constexpr, TILES: gl.constexpr, HALVES: gl.constexpr,
    CHUNK: gl.constexpr, P: gl.constexpr, N: gl.constexpr, PASSED: gl.constexpr, HAS_Z: gl.constexpr,
    STAGES: gl.constexpr, OWN_CB: gl.constexpr, SIGNED: gl.constexpr, HAS_INITIAL: gl.constexpr,
):  # fmt: skip
    """One warp group: the outputs of one tile, chunk by chunk."""
    (
        y_desc, x_smem, z_smem, B_smem, C_smem, cb_smem, state_smem, y_smem, shifted_smem, verdict_smem,
        full, published, summed, read, z_full, z_empty, decay_ptr, shifted_ptr, D_ptr,
        pid_b, pid_t, first, count, nchunks, nheads, stride_D_h, stride_D_p,
    ) = given  # fmt: skip
    dtype: gl.constexpr = x_smem.dtype
    acc_y: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, P, 16])
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    four: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    rows_y: gl.constexpr = gl.SliceLayout(1, acc_y)
    cols_y: gl.constexpr = gl.SliceLayout(0, acc_y)
    COPIES: gl.constexpr = 2 // HALVES
    tile = pid_t + WHICH
    blocks: gl.constexpr = _blocks(HEADDIM, P)
    pid_h = tile // blocks
    if D_ptr is not None:
        offs_D = tile % blocks * P + gl.arange(0, P, layout=cols_y)
        D = gl.load(D_ptr + pid_h * stride_D_h + offs_D * stride_D_p, mask=offs_D < HEADDIM, other=0.0).to(gl.float32)
    offs_t = gl.arange(0, CHUNK, layout=line)
    row = ((pid_b * nchunks + first).to(gl.int64) * nheads + pid_h) * CHUNK
    gdc_wait()
    offs_r = gl.arange(0, CHUNK, layout=rows_y)
    decay = gl.load(decay_ptr + row + offs_r)
    shifted = gl.load(shifted_ptr + row + offs_t)
    for i in range(count):
        stage = i % STAGES
        decay_t = decay
        shifted_smem.index(WHICH).store(shifted)
        barrier()
        row = ((pid_b * nchunks + first + min(i + 1, count - 1)).to(gl.int64) * nheads + pid_h) * CHUNK
        decay = gl.load(decay_ptr + row + offs_r)
        shifted = gl.load(shifted_ptr + row + offs_t)
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        if OWN_CB:  # not while the state is read: two sums at once would take too many registers
            cb = _form_products(B_smem, C_smem, stage, HALVES, CHUNK, N, acc_y)
            mix = _mixed(cb, decay_t, shifted_smem, WHICH, CHUNK, OWN_CB, SIGNED, acc_y, dtype)
        mbarrier.wait(published.index(WHICH * STAGES + stage), (i // STAGES) & 1)
        # What came before the chunk; meanwhile the decayed C·Bᵀ of the chunk itself.
        y = _read_state(C_smem, state_smem, stage, i % COPIES, WHICH, HALVES, CHUNK, P, N, acc_y)
        if not OWN_CB:
            cb = _load_products(cb_smem, stage, CHUNK, acc_y)
            mix = _mixed(cb, decay_t, shifted_smem, WHICH, CHUNK, OWN_CB, SIGNED, acc_y, dtype)
        from_start = exp2(decay_t)
        y = warpgroup_mma_wait(0, deps=[y])
        y = y * from_start[:, None]
        x_tile = x_smem.index(stage * TILES + WHICH).reshape([CHUNK, P])
        y = warpgroup_mma(mix, x_tile, y, is_async=True)
        mbarrier.wait(summed.index(WHICH * STAGES + stage), (i // STAGES) & 1)
        verdict = gl.sum(verdict_smem.index(WHICH * STAGES + stage).load(four), 0)
        skip = x_tile.load(acc_y)
        y = warpgroup_mma_wait(0, deps=[y])
        # Every warp has waited for the products of the chunk, and the last outputs have left: their tiles are free.
        tma.store_wait(0)
        barrier()
        y_tile = y_smem.index(WHICH).reshape([CHUNK, P])
        if verdict != 0.0:
            # Zero times NaN is NaN: in the product, what is not finite has reached the tokens before it as well. So
            # once more, with zeros in its place, and NaN from there on.
            x = x_tile.load(acc_y).to(gl.float32)
            y_tile.store(gl.where(gl.abs(x) < float("inf"), x, 0.0).to(dtype))
            fence_async_shared()
            barrier()
            y = _read_state(C_smem, state_smem, stage, i % COPIES, WHICH, HALVES, CHUNK, P, N, acc_y)
            y = warpgroup_mma_wait(0, deps=[y])
            if OWN_CB:
                cb = _form_products(B_smem, C_smem, stage, HALVES, CHUNK, N, acc_y)
            else:
                cb = _load_products(cb_smem, stage, CHUNK, acc_y)
            mix = _mixed(cb, decay_t, shifted_smem, WHICH, CHUNK, OWN_CB, SIGNED, acc_y, dtype)
            y = warpgroup_mma(mix, y_tile, y * exp2(decay_t)[:, None], is_async=True)
            y = warpgroup_mma_wait(0, deps=[y])
            skip = x_tile.load(acc_y)
            bad = gl.where(gl.abs(skip.to(gl.float32)) < float("inf"), CHUNK, offs_r[:, None])
            bad = gl.reduce(bad.to(gl.int8), 0, _least)
            y = gl.where(offs_r[:, None] >= bad[None, :], float("nan"), y)
            barrier()
        mbarrier.arrive(read.index(WHICH * STAGES + stage), count=1)
        if D_ptr is not None:
            y += D[None, :] * skip.to(gl.float32)
        if HAS_Z:
            mbarrier.wait(z_full.index(WHICH), i & 1)
            y *= silu(z_smem.index(WHICH).reshape([CHUNK, P]).load(acc_y).to(gl.float32))
        y_tile.store(y.to(dtype))
        fence_async_shared()
        barrier()
        if HAS_Z:
            mbarrier.arrive(z_empty.index(WHICH), count=1)
        store_tile(y_desc, [pid_b, pid_h, (first + i) * CHUNK, tile % blocks * P], y_smem.index(WHICH))
    tma.store_wait(0)


@gluon.jit
def _ssd_fwd_scan_hopper_kernel(
    x_desc, z_desc, B_desc, C_desc, cb_desc, y_desc, initial_desc,
    decay_ptr, shifted_ptr, D_ptr, initial_ptr, piece_state_ptr, piece_decay_ptr, final_ptr,
    nchunks, segment_chunks, nsegments, segment_pieces, npieces, nheads, ngroups, stride_D_h, stride_D_p,
    HEADDIM: gl.constexpr, DSTATE: gl.constexpr, TILES: gl.constexpr, HALVES: gl.constexpr, CHUNK: gl.constexpr,
    P: gl.constexpr, N: gl.constexpr, PASSED: gl.constexpr, HAS_Z: gl.constexpr, STAGES: gl.constexpr,
    OWN_CB: gl.constexpr, SIGNED: gl.constexpr,
):  # fmt: skip
    """Grid (tiles of all heads / TILES, segments, batch): a program owns one segment of TILES neighbouring tiles.

    Reads x, z, B, C and C·Bᵀ of the segment once (or forms C·Bᵀ: OWN_CB) and writes y once, by the copy engine, which
    also cuts ragged ends of the time axis, of heads and of states. A warp group for the outputs of each tile, and one
    for each tile and half of the states, both float32 in registers. There is room for two tiles, or for one tile and
    two halves. Initial states come first and lie, until they are in registers, where copies of later states will; two
    halves have no room for that, and load them (``initial_ptr``).
    """
    pid_t = gl.program_id(0) * TILES
    pid_s = gl.program_id(1)
    pid_b = gl.program_id(2)
    blocks: gl.constexpr = _blocks(HEADDIM, P)
    pid_g = pid_t // (nheads // ngroups * blocks)
    first = pid_s * segment_chunks
    count = min(segment_chunks, nchunks - first)
    dtype: gl.constexpr = x_desc.dtype
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x_smem = gl.allocate_shared_memory(dtype, [STAGES * TILES, 1, 1, CHUNK, P], x_desc.layout)
    B_smem = gl.allocate_shared_memory(dtype, [STAGES * HALVES, 1, 1, CHUNK, N], B_desc.layout)
    C_smem = gl.allocate_shared_memory(dtype, [STAGES * HALVES, 1, 1, CHUNK, N], C_desc.layout)
    if OWN_CB:  # noqa: SIM108 (the other branch must not be traced)
        cb_smem = x_smem
    else:
        cb_smem = gl.allocate_shared_memory(gl.float32, [STAGES, CHUNK, CHUNK], cb_desc.layout)
    if HAS_Z:  # noqa: SIM108 (the other branch must not be traced)
        z_smem = gl.allocate_shared_memory(dtype, [TILES, 1, 1, CHUNK, P], z_desc.layout)
    else:
        z_smem = x_smem
    y_smem = gl.allocate_shared_memory(dtype, [TILES, 1, 1, CHUNK, P], y_desc.layout)
    # Two copies of each state, or one of each half.
    state_smem = gl.allocate_shared_memory(dtype, [2 * TILES, P, N], gl.NVMMASharedLayout(128, 16, 2))
    shifted_smem = gl.allocate_shared_memory(gl.float32, [TILES, CHUNK], vector)
    weight_smem = gl.allocate_shared_memory(gl.float32, [TILES * HALVES, CHUNK], vector)
    verdict_smem = gl.allocate_shared_memory(gl.float32, [STAGES * TILES, 4], vector)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    z_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    z_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    initial_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    published = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    summed = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    # In one loop: the compiler puts a barrier between two that belong to the same allocation.
    for i in gl.static_range(2 * STAGES):
        if i < STAGES:
            mbarrier.init(full.index(i), count=1)
        if i < 2:
            mbarrier.init(z_full.index(i), count=1)
            mbarrier.init(z_empty.index(i), count=1)
            mbarrier.init(initial_full.index(i), count=1)
        mbarrier.init(published.index(i), count=HALVES)
        mbarrier.init(summed.index(i), count=HALVES)
        mbarrier.init(read.index(i), count=1)
    # The copy engine counts on these barriers: it has to see them set up.
    fence_async_shared()
    initial_smem = state_smem
    if initial_desc is not None:
        # A tile has room for two 16-bit copies: for one state in float32, or one in 16 bits and a gap.
        bits: gl.constexpr = initial_desc.dtype.primitive_bitwidth
        layout: gl.constexpr = initial_desc.layout  # Triton 3.6 hands none on that is no constant
        initial_smem = seen_as(state_smem, layout, initial_desc.dtype, [TILES * 32 // bits, 1, P, N])
        if (pid_s == 0) | (not PASSED):
            for which in gl.static_range(TILES):
                tile = pid_t + which
                bar = initial_full.index(which)
                mbarrier.expect(bar, P * N * bits // 8)
                at = initial_smem.index(which * (32 // bits))
                load_tile(initial_desc, [pid_b * nheads + tile // blocks, tile % blocks * P, 0], bar, at)
    outputs = (
        y_desc, x_smem, z_smem, B_smem, C_smem, cb_smem, state_smem, y_smem, shifted_smem, verdict_smem,
        full, published, summed, read, z_full, z_empty, decay_ptr, shifted_ptr, D_ptr,
        pid_b, pid_t, first, count, nchunks, nheads, stride_D_h, stride_D_p,
    )  # fmt: skip
    states = (
        x_smem, B_smem, state_smem, initial_smem, weight_smem, verdict_smem, full, published, summed, read,
        initial_full, decay_ptr, shifted_ptr, initial_ptr, piece_state_ptr, piece_decay_ptr, final_ptr,
        pid_b, pid_s, pid_t, first, count, nchunks, nsegments, segment_pieces, npieces, nheads,
    )  # fmt: skip
    fetch = (
        x_desc, z_desc, B_desc, C_desc, cb_desc, x_smem, z_smem, B_smem, C_smem, cb_smem, full, summed, read,
        z_full, z_empty, pid_b, pid_t, pid_g, first, count, nchunks, ngroups,
    )  # fmt: skip
    HAS_INITIAL: gl.constexpr = initial_desc is not None
    if TILES == 2:
        gl.warp_specialize(
            [
                (_walk_y, (outputs, 0, HEADDIM, DSTATE, TILES, HALVES, CHUNK, P, N,
                           PASSED, HAS_Z, STAGES, OWN_CB, SIGNED, HAS_INITIAL)),
                (_walk_y, (outputs, 1, HEADDIM, DSTATE, TILES, HALVES, CHUNK, P, N,
                           PASSED, HAS_Z, STAGES, OWN_CB, SIGNED, HAS_INITIAL)),
                (_walk_state, (states, 0, HEADDIM, DSTATE, TILES, HALVES, CHUNK, P, N,
                               PASSED, HAS_Z, STAGES, OWN_CB, SIGNED, HAS_INITIAL)),
                (_walk_state, (states, 1, HEADDIM, DSTATE, TILES, HALVES, CHUNK, P, N,
                               PASSED, HAS_Z, STAGES, OWN_CB, SIGNED, HAS_INITIAL)),
                (_fetch_scan, (fetch, HEADDIM, DSTATE, TILES, HALVES, CHUNK, P, N,
                               PASSED, HAS_Z, STAGES, OWN_CB, SIGNED, HAS_INITIAL)),
            ],
            [4, 4, 4, 1],
            [112, 112, 112, 24],
        )  # fmt: skip
    elif HALVES == 2:
        gl.warp_specialize(
            [
                (_walk_y, (outputs, 0, HEADDIM, DSTATE, TILES, HALVES, CHUNK, P, N,
                           PASSED, HAS_Z, STAGES, OWN_CB, SIGNED, HAS_INITIAL)),
                (_walk_state, (states, 0, HEADDIM, DSTATE, TILES, HALVES, CHUNK, P, N,
                               PASSED, HAS_Z, STAGES, OWN_CB, SIGNED, HAS_INITIAL)),
                (_walk_state, (states, 1, HEADDIM, DSTATE, TILES, HALVES, CHUNK, P, N,
                               PASSED, HAS_Z, STAGES, OWN_CB, SIGNED, HAS_INITIAL)),
                (_fetch_scan, (fetch, HEADDIM, DSTATE, TILES, HALVES, CHUNK, P, N,
                               PASSED, HAS_Z, STAGES, OWN_CB, SIGNED, HAS_INITIAL)),
            ],
            [4, 4, 1],
            [152, 152, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_walk_y, (outputs, 0, HEADDIM, DSTATE, TILES, HALVES, CHUNK, P, N,
                           PASSED, HAS_Z, STAGES, OWN_CB, SIGNED, HAS_INITIAL)),
                (_walk_state, (states, 0, HEADDIM, DSTATE, TILES, HALVES, CHUNK, P, N,
                               PASSED, HAS_Z, STAGES, OWN_CB, SIGNED, HAS_INITIAL)),
                (_fetch_scan, (fetch, HEADDIM, DSTATE, TILES, HALVES, CHUNK, P, N,
                               PASSED, HAS_Z, STAGES, OWN_CB, SIGNED, HAS_INITIAL)),
            ],
            [4, 1],
            [88 if N == 64 else 208, 24],
        )  # fmt: skip
