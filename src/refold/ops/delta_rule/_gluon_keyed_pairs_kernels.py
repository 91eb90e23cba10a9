"""What the delta rule's backward sums over pairs of tokens of a chunk, on Hopper, for one decay per key.

It replaces `_delta_bwd_keyed_kernel`, and what adds up heads after it, for bfloat16, chunks of 64 tokens, 65 to 128
keys and values, and what is read being the keys; their second launch does again what has values that are not finite.
As in `_gluon_pairs_kernels`, a program takes one item, a chunk of a group, after the other. With c, the sums of log2
decays, D, the gradient of the state after the chunk, and "." for products element by element,

    A = strict(dY Uᵀ)    B = -strict(W Uᵀ)    dQ = dY S . 2^c    dR = -W S . 2^c    dK = U D . 2^(c_last - c)

and of pairs [i, j] that have one reference, the sums of decays at a token between them (or near them: NEAR),

    X = 2^(c - reference)    dQ += A (K / X) . X    dR += B (K / X) . X    dK += (Aᵀ (Q . X) + Bᵀ (beta K . X)) / X

The gradient of the log decay of a token sums what crosses it: from the state before, dQ . Q + beta dR . K of it and
later tokens; to the state after, dK . K of earlier tokens. What is between two tokens is in dQ . Q + beta dR . K of the
later one and, as the same products, in dK . K of the earlier one. Their difference, summed over a token and later ones,
is what crosses it: it has three parts of 8 bits. Scaled tiles lie where U, W, S and D were: these come last.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from refold.ops.delta_rule._gluon_pairs_kernels import (
    by_rows,
    by_state,
    halves,
    load_rows,
    put_sums,
    row_sums,
    send,
    take,
    unit_gradients,
    unknown_zero,
)
from refold.ops.triton.gluon import barrier, exp2, load_tile, reciprocal, seen_as

# What barriers tell: that tiles are empty, and that they are full. With _QK, the tiles of queries and keys hold their
# gradients. _QK and _Q_K have the places that `send` and `take` know.
_READ, _USED, _, _QK = (gl.constexpr(i) for i in range(4))
_EARLY, _LATE, _Q_K = (gl.constexpr(i) for i in range(3))
_DIAGONAL, _READS, _VALUES = (gl.constexpr(i) for i in range(3))
_LEVELS = gl.constexpr(6)


@gluon.jit
def _fetch(given, C: gl.constexpr, N: gl.constexpr, P: gl.constexpr, BLOCKS: gl.constexpr):
    """One warp: the tiles of each head, BLOCKS times P values; and keys and queries of an item, and their gradients."""
    (
        q_desc, k_desc, dy_desc, c_desc, u_desc, w_desc, entering_desc, leaving_desc, dq_desc, dk_desc, q_smem, k_smem,
        c_smem, dy_smem, u_smem, w_smem, before_smem, after_smem, full, empty, first, count, step, nchunks, ngroups,
        heads,
    ) = given  # fmt: skip
    gdc_wait()
    for n in range(count * heads):
        head = n % heads
        item = first + n // heads * step
        batch = item // ngroups // nchunks
        start = item // ngroups % nchunks * C
        cell = item * heads + head
        row = cell * C
        phase = (n & 1) ^ 1
        mbarrier.wait(empty.index(_READ), phase)
        bar = full.index(_EARLY)
        mbarrier.expect(bar, BLOCKS * P * C * 2)
        for block in gl.static_range(BLOCKS):
            load_tile(dy_desc, [batch, item % ngroups * heads + head, start, block * P], bar, dy_smem.index(block))
        mbarrier.wait(empty.index(_USED), phase)
        bar = full.index(_LATE)
        mbarrier.expect(bar, BLOCKS * P * (2 * C + 2 * N) * 2 + C * N * 4)
        for block in gl.static_range(BLOCKS):
            load_tile(entering_desc, [0, cell, block * P, 0], bar, before_smem.index(block))
            load_tile(u_desc, [0, 0, row, block * P], bar, u_smem.index(block))
        load_tile(c_desc, [0, 0, row, 0], bar, c_smem.index(0))
        for block in gl.static_range(BLOCKS):
            load_tile(w_desc, [0, 0, row, block * P], bar, w_smem.index(block))
        for block in gl.static_range(BLOCKS):
            load_tile(leaving_desc, [0, cell, block * P, 0], bar, after_smem.index(block))
        if head == 0:
            if n > 0:
                send(dq_desc, dk_desc, q_smem, k_smem, empty, item - step, n // heads - 1, nchunks, ngroups, C)
            take(q_desc, k_desc, q_smem, k_smem, full, item, nchunks, ngroups, C, N)
    send(dq_desc, dk_desc, q_smem, k_smem, empty, first + (count - 1) * step, count - 1, nchunks, ngroups, C)


@gluon.jit
def _from_reference(c_tile, c_rows, level, rows, offs_n, nkeys, layout: gl.constexpr):
    """Return c less its value at the token where blocks of 1 << level tokens of a pair meet."""
    reference = ((rows >> (level + 1)) * 2 + 1) << level
    at = c_rows + reference[:, None] * nkeys + offs_n[None, :]
    return c_tile.load(layout) - gl.load(at, mask=(offs_n < nkeys)[None, :], other=0.0)


@gluon.jit
def _upper(tile):
    """Return the upper 16 bits of each number, which bfloat16 holds."""
    return (tile.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def _largest(tile):
    """Return the largest element."""
    return gl.max(gl.reshape(tile, [tile.shape[0] * tile.shape[1]]), 0)


@gluon.jit
def _between_tokens(
    tiles, c_rows, level, all16, beta, q_factor, k_factor, nkeys, dq, dk, crossing, erased
):  # fmt: skip
    """Add what is between two tokens in the two halves of a block of 2 << level; with ``all16``, any two of a block.

    ``crossing`` sums dQ . Q + beta dR . K - dK . K, ``erased`` dR . K of both halves of rows.
    """
    q_smem, k_smem, c_smem, squares, scaled_smem, read_smem, factor_smem = tiles
    dtype: gl.constexpr = q_smem.dtype
    C: gl.constexpr = dq.shape[0]
    N: gl.constexpr = dq.shape[1]
    acc: gl.constexpr = dq.type.layout
    acc_c: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, C // 2, 16])
    wide = gl.zeros([C, N], gl.float32, layout=acc)
    here = unknown_zero()
    rows = gl.arange(0, C, layout=gl.SliceLayout(1, acc)) + here
    i = (gl.arange(0, C, layout=gl.SliceLayout(1, acc_c)) + here)[:, None]
    j = (gl.arange(0, C, layout=gl.SliceLayout(0, acc_c)) + here)[None, :]
    offs_n = gl.arange(0, N, layout=gl.SliceLayout(0, acc)) + here * 16  # still known to be in steps of 16
    q_tile = q_smem.index(here).reshape([C, N])
    k_tile = k_smem.index(here).reshape([C, N])
    k_scaled = scaled_smem.index(here)
    q_scaled = scaled_smem.index(here + 1)
    read_scaled = read_smem.index(here)
    a_smem = squares.index(here + 2)
    b_smem = squares.index(here + 3)
    apart = i ^ j
    pairs = (i > j) & (apart < (2 << level)) & (all16 | (apart >= (1 << level)))
    a_smem.store(gl.where(pairs, squares.index(here).load(acc_c).to(gl.float32), 0.0).to(dtype))
    b_smem.store(gl.where(pairs, squares.index(here + 1).load(acc_c).to(gl.float32), 0.0).to(dtype))
    # What is of other tokens than the later or the earlier ones of pairs meets zeros of A and B.
    forth = gl.where(all16, 1, (rows >> level) & 1)[:, None] == 1
    c_tile = c_smem.index(here).reshape([C, N])
    factor = _from_reference(c_tile, c_rows, level, rows, offs_n, nkeys, acc)
    factor = exp2(gl.where(forth, factor, factor * -1.0))
    factor_smem.index(here).store(factor)
    k_wide = k_tile.load(acc).to(gl.float32) * k_factor
    k_scaled.store((k_wide * gl.where(all16, reciprocal(factor), factor)).to(dtype))
    read_scaled.store((k_wide * (beta * factor)).to(dtype))
    q_scaled.store((q_tile.load(acc).to(gl.float32) * (q_factor * factor)).to(dtype))
    fence_async_shared()
    barrier()
    sums = warpgroup_mma(a_smem, k_scaled, wide, use_acc=False, is_async=True)
    sums = warpgroup_mma_wait(0, deps=[sums])
    crossing = crossing + sums * q_scaled.load(acc).to(gl.float32)
    dq = dq + sums * factor_smem.index(here).load(acc)
    sums = warpgroup_mma(b_smem, k_scaled, wide, use_acc=False, is_async=True)
    sums = warpgroup_mma_wait(0, deps=[sums])
    crossing = crossing + sums * read_scaled.load(acc).to(gl.float32)
    sums = sums * factor_smem.index(here).load(acc)
    dk = dk + sums * beta
    erased = erased + halves(sums * (k_tile.load(acc).to(gl.float32) * k_factor))
    sums = warpgroup_mma(a_smem.permute((1, 0)), q_scaled, wide, use_acc=False, is_async=True)
    sums = warpgroup_mma(b_smem.permute((1, 0)), read_scaled, sums, is_async=True)
    sums = warpgroup_mma_wait(0, deps=[sums])
    factor = factor_smem.index(here).load(acc)
    dk = dk + sums * gl.where(all16, reciprocal(factor), factor)
    crossing = crossing - sums * k_scaled.load(acc).to(gl.float32)
    barrier()
    return dq, dk, crossing, erased


@gluon.jit
def _sum_up(
    given, C: gl.constexpr, N: gl.constexpr, P: gl.constexpr, BLOCKS: gl.constexpr, NORMALIZE: gl.constexpr,
    EPS: gl.constexpr, NEAR: gl.constexpr,
):  # fmt: skip
    """Eight warps: all products."""
    (
        q_smem, k_smem, c_smem, dy_smem, u_smem, w_smem, before_smem, after_smem, squares, rows_smem,
        sums_smem, vectors, kept_smem, full, empty, c_ptr, v_ptr, more_ptr, dg_ptr, dbeta_ptr, flags_ptr,
        first, count, step, seqlen, nchunks, ngroups, heads, nkeys, nvalues, slices, scale,
        stride_v_b, stride_v_t, stride_v_h,
    ) = given  # fmt: skip
    dtype: gl.constexpr = q_smem.dtype
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, N // 2, 16])
    acc_c: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, C // 2, 16])
    of_keys: gl.constexpr = gl.SliceLayout(1, acc)
    keys: gl.constexpr = gl.SliceLayout(0, acc)
    line: gl.constexpr = gl.BlockedLayout([2], [32], [8], [0])  # every warp has all
    four: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 2], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    flat_n: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
    lines = gl.arange(0, C, layout=gl.SliceLayout(1, acc_c))
    columns = gl.arange(0, C, layout=gl.SliceLayout(0, acc_c))
    rows = gl.arange(0, C, layout=of_keys)
    offs_n = gl.arange(0, N, layout=keys)
    offs_t = gl.arange(0, C, layout=line)
    v_rows = gl.arange(0, C, layout=gl.SliceLayout(1, flat))
    v_cols = gl.arange(0, P, layout=gl.SliceLayout(0, flat))
    square = gl.zeros([C, C], gl.float32, layout=acc_c)
    wide = gl.zeros([C, N], gl.float32, layout=acc)
    whole: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    # Scaled tiles of queries, keys and read keys, and what crosses a token from earlier ones: where D, W and U were.
    scaled_smem = seen_as(after_smem, whole, shape=[BLOCKS, P, N])
    read_smem = seen_as(w_smem, whole, shape=[1, C, N])
    earlier_smem = seen_as(u_smem, whole, shape=[1, C, N])
    powers: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    factor_smem = seen_as(before_smem, powers, gl.float32, [1, C, N])  # each thread reads its own
    tiles = (q_smem, k_smem, c_smem, squares, scaled_smem, read_smem, factor_smem)
    gdc_wait()
    rows_next = load_rows(more_ptr, first * heads, C, four)
    factors = seen_as(rows_smem, gl.SwizzledSharedLayout(1, 1, 1, [0]), shape=[8, C])
    for n in range(count):
        item = first + n * step
        batch = item // ngroups // nchunks
        start = item // ngroups % nchunks * C
        inside = seqlen - start
        dq = wide
        dk = wide
        spoiled = halves(wide)  # zeros; then not where it is not finite
        for head in range(heads):
            zero = unknown_zero()
            q_tile = q_smem.index(zero).reshape([C, N])
            k_tile = k_smem.index(zero).reshape([C, N])
            c_tile = c_smem.index(zero).reshape([C, N])
            cell = item * heads + head
            pid_h = item % ngroups * heads + head
            phase = (n * heads + head) & 1
            rows_smem.index(phase).store(rows_next)
            beta_smem = factors.index(phase * 4)
            q_factor_smem = factors.index(phase * 4 + 1)
            k_factor_smem = factors.index(phase * 4 + 2)
            after = gl.where(head + 1 < heads, cell + 1, (first + gl.minimum(n + 1, count - 1) * step) * heads)
            rows_next = load_rows(more_ptr, after, C, four)
            i = (lines + zero)[:, None]
            j = (columns + zero)[None, :]
            c_rows = c_ptr + cell.to(gl.int64) * C * nkeys

            # What is between a token and the state before the chunk, or the one after it.
            mbarrier.wait(full.index(_EARLY), phase)
            value = gl.zeros([C], gl.float32, layout=gl.SliceLayout(1, flat))
            v_at = v_ptr + batch.to(gl.int64) * stride_v_b + start.to(gl.int64) * stride_v_t + pid_h * stride_v_h
            v_at = v_at + v_rows[:, None] * stride_v_t + v_cols[None, :]
            mbarrier.wait(full.index(_LATE), phase)
            part = by_state(wide, dy_smem, before_smem, zero, C, N, P, BLOCKS)
            A = by_rows(square, dy_smem, u_smem, zero, C, P, BLOCKS)
            B = by_rows(square, w_smem, u_smem, zero, C, P, BLOCKS)
            for block in gl.static_range(BLOCKS):
                live = (v_rows < inside)[:, None] & (v_cols < nvalues - block * P)[None, :]
                v = gl.load(v_at + block * P, mask=live, other=0.0).to(gl.float32)
                w = w_smem.index(zero + block).reshape([C, P]).load(flat).to(gl.float32)
                value = value + gl.sum(v * w, 1)
            vectors.index(2 * _VALUES).store(value)
            part, A, B = warpgroup_mma_wait(0, deps=[part, A, B])
            if head == 0:
                mbarrier.wait(full.index(_Q_K), n & 1)
            beta = beta_smem.load(of_keys)[:, None]
            k_factor = k_factor_smem.load(of_keys)[:, None]
            q_factor = q_factor_smem.load(of_keys)[:, None]
            since = exp2(c_tile.load(acc))
            part = part * since
            dq = dq + part
            crossing = part * (q_tile.load(acc).to(gl.float32) * q_factor)
            part = by_state(wide, w_smem, before_smem, zero, C, N, P, BLOCKS)
            kept = gl.zeros([P, N], gl.float32, layout=flat_n)
            for block in gl.static_range(BLOCKS):
                before = before_smem.index(zero + block).reshape([P, N]).load(flat_n).to(gl.float32)
                kept = kept + before * after_smem.index(zero + block).reshape([P, N]).load(flat_n).to(gl.float32)
            kept_smem.store(gl.sum(kept, 0))
            part = warpgroup_mma_wait(0, deps=[part])
            part = part * (since * -1.0)
            dk = dk + part * beta
            part = part * (k_tile.load(acc).to(gl.float32) * k_factor)
            erased = halves(part)
            crossing = crossing + part * beta
            part = by_state(wide, u_smem, after_smem, zero, C, N, P, BLOCKS)
            part = warpgroup_mma_wait(0, deps=[part])
            total = gl.load(c_rows + (C - 1) * nkeys + offs_n, mask=offs_n < nkeys, other=0.0)
            part = part * exp2(total[None, :] - c_tile.load(acc))
            dk = dk + part
            put_sums(sums_smem.index(_DIAGONAL), gl.where(i == j, A, 0.0))
            barrier()
            mbarrier.arrive(empty.index(_READ), count=1)
            earlier_smem.index(zero).store((part * (k_tile.load(acc).to(gl.float32) * k_factor)).to(dtype))
            squares.index(zero).store(A.to(dtype))
            squares.index(zero + 1).store((B * -1.0).to(dtype))
            far = gl.abs(_from_reference(c_tile, c_rows, 3, rows, offs_n, nkeys, acc))
            near = _largest(far) < NEAR

            # What is between two tokens of the chunk: of 16 of them where they are near, else level by level.
            for level in range(gl.where(near, 3, 0), _LEVELS):
                all16 = near & (level == 3)
                dq, dk, crossing, erased = _between_tokens(
                    tiles, c_rows, level, all16, beta, q_factor, k_factor, nkeys, dq, dk, crossing, erased
                )
            zero = unknown_zero()
            i = (lines + zero)[:, None]
            j = (columns + zero)[None, :]
            k_scaled = scaled_smem.index(zero)
            q_scaled = scaled_smem.index(zero + 1)
            read_scaled = read_smem.index(zero)
            a_smem = squares.index(zero)
            b_smem = squares.index(zero + 1)
            q_tile = q_smem.index(zero).reshape([C, N])
            k_tile = k_smem.index(zero).reshape([C, N])
            a_smem.store(gl.where(j >= i, 1.0, 0.0).to(dtype))
            b_smem.store(gl.where(j < i, 1.0, 0.0).to(dtype))
            spoiled = spoiled + halves(crossing * 0.0)
            high = _upper(crossing)
            q_scaled.store(high.to(dtype))
            crossing = crossing - high
            high = _upper(crossing)
            k_scaled.store(high.to(dtype))
            read_scaled.store((crossing - high).to(dtype))
            fence_async_shared()
            barrier()
            dg = warpgroup_mma(a_smem, q_scaled, wide, use_acc=False, is_async=True)
            dg = warpgroup_mma(a_smem, k_scaled, dg, is_async=True)
            dg = warpgroup_mma(a_smem, read_scaled, dg, is_async=True)
            dg = warpgroup_mma(b_smem, earlier_smem.index(zero), dg, is_async=True)
            k_wide = k_tile.load(acc).to(gl.float32) * k_factor
            own = row_sums(vectors, _DIAGONAL, of_keys)[:, None]
            sums_smem.index(_READS).permute((1, 0)).store(erased)
            dq = dq + own * k_wide
            dk = dk + own * (q_tile.load(acc).to(gl.float32) * q_factor)
            dg = warpgroup_mma_wait(0, deps=[dg])
            fence_async_shared()
            barrier()
            mbarrier.arrive(empty.index(_USED), count=1)
            token = (batch.to(gl.int64) * seqlen + start) * (ngroups * heads) + pid_h
            if dbeta_ptr is not None:
                at = dbeta_ptr + (token + offs_t * (ngroups * heads)) * slices
                dbeta = row_sums(vectors, _READS, line) + vectors.index(2 * _VALUES).load(line)
                gl.store(at, dbeta, mask=offs_t < inside)
                for other in range(1, slices):
                    gl.store(at + other, offs_t * 0.0, mask=offs_t < inside)
            total = gl.load(c_rows + (C - 1) * nkeys + offs_n, mask=offs_n < nkeys, other=0.0)
            dg = dg + (kept_smem.load(keys) * exp2(total))[None, :]
            at = (token + rows * (ngroups * heads))[:, None] * nkeys + offs_n[None, :]
            gl.store(dg_ptr + at, dg, mask=(rows < inside)[:, None] & (offs_n < nkeys)[None, :])
        dq = dq * scale
        q_tile = q_smem.index(unknown_zero()).reshape([C, N])
        k_tile = k_smem.index(unknown_zero()).reshape([C, N])
        bad = _largest(gl.where(spoiled + halves((dq + dk) * 0.0) == 0.0, 0, 1))
        for s in range(heads * slices):
            gl.store(flags_ptr + item * heads * slices + s, bad)
        if NORMALIZE:
            q = q_tile.load(acc).to(gl.float32)
            k = k_tile.load(acc).to(gl.float32)
            dq, dk = unit_gradients(sums_smem, vectors, q, k, dq, dk, EPS)
        q_tile.store(dq.to(dtype))
        k_tile.store(dk.to(dtype))
        fence_async_shared()
        barrier()
        mbarrier.arrive(empty.index(_QK), count=1)


@gluon.jit
def _delta_keyed_pairs_hopper_kernel(
    q_desc, k_desc, dy_desc, c_desc, u_desc, w_desc, entering_desc, leaving_desc, dq_desc, dk_desc,
    c_ptr, v_ptr, more_ptr, dg_ptr, dbeta_ptr, flags_ptr,
    seqlen, nchunks, items, ngroups, heads, nkeys, nvalues, slices, scale, stride_v_b, stride_v_t, stride_v_h,
    C: gl.constexpr, N: gl.constexpr, P: gl.constexpr, NORMALIZE: gl.constexpr, EPS: gl.constexpr,
    NEAR: gl.constexpr,
):  # fmt: skip
    """Any grid (programs): as `_delta_bwd_keyed_kernel`, and gradients of q and k as `_delta_bwd_finish_kernel`.

    Flags, (items, heads, ``slices``), are raised where gradients of q or k of an item are not finite.
    """
    BLOCKS: gl.constexpr = 2
    first = gl.program_id(0)
    step = gl.num_programs(0)
    count = gl.cdiv(items - first, step)
    dtype: gl.constexpr = q_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [1, 1, 1, C, N], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [1, 1, 1, C, N], k_desc.layout)
    c_smem = gl.allocate_shared_memory(gl.float32, [1, 1, 1, C, N], c_desc.layout)
    dy_smem = gl.allocate_shared_memory(dtype, [BLOCKS, 1, 1, C, P], dy_desc.layout)
    u_smem = gl.allocate_shared_memory(dtype, [BLOCKS, 1, 1, C, P], u_desc.layout)
    w_smem = gl.allocate_shared_memory(dtype, [BLOCKS, 1, 1, C, P], w_desc.layout)
    before_smem = gl.allocate_shared_memory(dtype, [BLOCKS, 1, 1, P, N], entering_desc.layout)
    after_smem = gl.allocate_shared_memory(dtype, [BLOCKS, 1, 1, P, N], leaving_desc.layout)
    square: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    squares = gl.allocate_shared_memory(dtype, [4, C, C], square)  # A and -B, and their pairs of a level
    rows_smem = gl.allocate_shared_memory(gl.float32, [2, 4, C], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    sums_smem = gl.allocate_shared_memory(gl.float32, [4, 2, C], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    vectors = seen_as(sums_smem, gl.SwizzledSharedLayout(1, 1, 1, [0]), shape=[8, C])
    kept_smem = gl.allocate_shared_memory(gl.float32, [N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for bar in gl.static_range(3):
        mbarrier.init(full.index(bar), count=1)
    for bar in gl.static_range(4):
        mbarrier.init(empty.index(bar), count=1)
    # The copy engine counts on these barriers: it has to see them set up.
    fence_async_shared()
    fetch = (
        q_desc, k_desc, dy_desc, c_desc, u_desc, w_desc, entering_desc, leaving_desc, dq_desc, dk_desc, q_smem, k_smem,
        c_smem, dy_smem, u_smem, w_smem, before_smem, after_smem, full, empty, first, count, step, nchunks, ngroups,
        heads,
    )  # fmt: skip
    sums = (
        q_smem, k_smem, c_smem, dy_smem, u_smem, w_smem, before_smem, after_smem, squares, rows_smem,
        sums_smem, vectors, kept_smem, full, empty, c_ptr, v_ptr, more_ptr, dg_ptr, dbeta_ptr, flags_ptr,
        first, count, step, seqlen, nchunks, ngroups, heads, nkeys, nvalues, slices, scale,
        stride_v_b, stride_v_t, stride_v_h,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_sum_up, (sums, C, N, P, BLOCKS, NORMALIZE, EPS, NEAR)),
            (_fetch, (fetch, C, N, P, BLOCKS)),
        ],
        [1],
        [24],
    )
