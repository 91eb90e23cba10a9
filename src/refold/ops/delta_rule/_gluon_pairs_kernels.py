"""What the delta rule's backward sums over pairs of tokens of a chunk, on Hopper, for one decay per head.

It replaces `_delta_bwd_pairs_kernel` for bfloat16, chunks of 64 tokens, 65 to 128 keys,
and what is read being the keys; its second launch does again what has values that are not finite. A program takes
one item, a chunk of a group, after the other: one warp loads tiles through the copy engine, each as soon as it is free,
and eight warps keep the gradients of q and k in registers until the last head of the group. Head i of an item is cell
``item * heads + i``. With D, the gradient of the state after the chunk,

    A = tril(dY Uᵀ)    B = -strict(W Uᵀ)    dQ = dY S + A K    dK = U D - W S + Aᵀ Q + (B + Bᵀ) K

where decays and factors of rows are left out. A and B go through shared memory, each with both of its factors.
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

from refold.ops.triton.gluon import append, barrier, exp2, load_tile, seen_as, store_tile

# What barriers tell: that tiles are empty, and that they are full (all but that of the state after the chunk, which
# comes last). With _QK, the tiles of queries and keys hold their gradients.
_DY, _W_V, _REST, _QK = (gl.constexpr(i) for i in range(4))
_MOST, _AFTER, _Q_K = (gl.constexpr(i) for i in range(3))
# Sums over keys, over earlier tokens, and over values.
_QUERIES, _READS, _WRITES, _STRENGTHS, _DECAYS, _VALUES = (gl.constexpr(i) for i in range(6))


@gluon.jit
def _fetch(given, C: gl.constexpr, N: gl.constexpr, P: gl.constexpr, BLOCKS: gl.constexpr):
    """One warp: the tiles of each head, BLOCKS times P values; and keys and queries of an item, and their gradients."""
    (
        q_desc, k_desc, v_desc, dy_desc, u_desc, w_desc, entering_desc, leaving_desc, dq_desc, dk_desc, q_smem, k_smem,
        v_smem, dy_smem, u_smem, w_smem, before_smem, after_smem, full, empty, first, count, step, nchunks, ngroups,
        heads,
    ) = given  # fmt: skip
    gdc_wait()
    for n in range(count * heads):
        head = n % heads
        item = first + n // heads * step
        batch = item // ngroups // nchunks
        start = item // ngroups % nchunks * C
        pid_h = item % ngroups * heads + head
        cell = item * heads + head
        row = cell * C
        phase = (n & 1) ^ 1
        bar = full.index(_MOST)
        mbarrier.wait(empty.index(_DY), phase)
        mbarrier.expect(bar, BLOCKS * P * (4 * C + N) * 2)
        for block in gl.static_range(BLOCKS):
            load_tile(dy_desc, [batch, pid_h, start, block * P], bar, dy_smem.index(block))
        mbarrier.wait(empty.index(_W_V), phase)
        for block in gl.static_range(BLOCKS):
            load_tile(w_desc, [0, 0, row, block * P], bar, w_smem.index(block))
        mbarrier.wait(empty.index(_REST), phase)
        for block in gl.static_range(BLOCKS):
            load_tile(u_desc, [0, 0, row, block * P], bar, u_smem.index(block))
            load_tile(entering_desc, [0, cell, block * P, 0], bar, before_smem.index(block))
            load_tile(v_desc, [batch, pid_h, start, block * P], bar, v_smem.index(block))
        mbarrier.expect(full.index(_AFTER), BLOCKS * P * N * 2)
        for block in gl.static_range(BLOCKS):
            load_tile(leaving_desc, [0, cell, block * P, 0], full.index(_AFTER), after_smem.index(block))
        if head == 0:
            if n > 0:
                send(dq_desc, dk_desc, q_smem, k_smem, empty, item - step, n // heads - 1, nchunks, ngroups, C)
            take(q_desc, k_desc, q_smem, k_smem, full, item, nchunks, ngroups, C, N)
    send(dq_desc, dk_desc, q_smem, k_smem, empty, first + (count - 1) * step, count - 1, nchunks, ngroups, C)


@gluon.jit
def take(q_desc, k_desc, q_smem, k_smem, full, item, nchunks, ngroups, C: gl.constexpr, N: gl.constexpr):
    """Start to load the queries and keys of an item."""
    place = [item // ngroups // nchunks, item % ngroups, item // ngroups % nchunks * C, 0]
    bar = full.index(_Q_K)
    mbarrier.expect(bar, 2 * C * N * 2)
    load_tile(k_desc, place, bar, k_smem.index(0))
    load_tile(q_desc, place, bar, q_smem.index(0))


@gluon.jit
def send(dq_desc, dk_desc, q_smem, k_smem, empty, item, i, nchunks, ngroups, C: gl.constexpr):
    """Write the gradients of an item, the i-th of this program, as soon as they are there."""
    mbarrier.wait(empty.index(_QK), i & 1)
    place = [item // ngroups // nchunks, item % ngroups, item // ngroups % nchunks * C, 0]
    store_tile(dq_desc, place, q_smem.index(0))
    store_tile(dk_desc, place, k_smem.index(0))
    tma.store_wait(0)


@gluon.jit
def unknown_zero():
    """Return a zero that the compiler does not know: what is computed with it is not kept over the whole loop.

    The addresses of tiles, in the form that products take, are constants; hundreds of them would be, in registers.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], gl.int32, False, 1)


@gluon.jit
def by_state(
    acc, tokens_smem, state_smem, zero, C: gl.constexpr, N: gl.constexpr, P: gl.constexpr, BLOCKS: gl.constexpr
):
    """Start adding the product of rows of values with a state."""
    for block in gl.static_range(BLOCKS):
        state = state_smem.index(zero + block).reshape([P, N])
        acc = warpgroup_mma(tokens_smem.index(zero + block).reshape([C, P]), state, acc, is_async=True)
    return acc


@gluon.jit
def by_rows(acc, left_smem, right_smem, zero, C: gl.constexpr, P: gl.constexpr, BLOCKS: gl.constexpr):
    """Start adding the products of rows of values with one another."""
    for block in gl.static_range(BLOCKS):
        right = right_smem.index(zero + block).reshape([C, P]).permute((1, 0))
        acc = warpgroup_mma(left_smem.index(zero + block).reshape([C, P]), right, acc, is_async=True)
    return acc


@gluon.jit
def _products(a_smem, b_smem, zero, R: gl.constexpr, M: gl.constexpr, BLOCKS: gl.constexpr, layout: gl.constexpr):
    """Return the sums of the rows of two tiles, multiplied element by element."""
    total = gl.zeros([R], gl.float32, layout=gl.SliceLayout(1, layout))
    for block in gl.static_range(BLOCKS):
        a = a_smem.index(zero + block).reshape([R, M]).load(layout).to(gl.float32)
        total = total + gl.sum(a * b_smem.index(zero + block).reshape([R, M]).load(layout).to(gl.float32), 1)
    return total


@gluon.jit
def halves(tile):
    """Return the sums of both halves of rows, which belong to different warps: (rows, 2)."""
    return gl.sum(gl.reshape(tile, [tile.shape[0], 2, tile.shape[1] // 2]), 2)


@gluon.jit
def put_sums(sums_smem, tile):
    """Leave the sums of halves of rows in shared memory: no barrier."""
    sums_smem.permute((1, 0)).store(halves(tile))


@gluon.jit
def row_sums(vectors, which: gl.constexpr, layout: gl.constexpr):
    """Return the sums that `put_sums` left."""
    return vectors.index(2 * which).load(layout) + vectors.index(2 * which + 1).load(layout)


@gluon.jit
def unit_gradients(sums_smem, vectors, q, k, dq, dk, EPS: gl.constexpr):
    """Return the gradients of rows of q and k that were divided by their lengths, from those of the quotients."""
    of_rows: gl.constexpr = gl.SliceLayout(1, q.type.layout)
    put_sums(sums_smem.index(0), q * q)
    put_sums(sums_smem.index(1), q * dq)
    put_sums(sums_smem.index(2), k * k)
    put_sums(sums_smem.index(3), k * dk)
    barrier()
    q_factor = 1.0 / gl.sqrt(row_sums(vectors, 0, of_rows) + EPS)
    q_product = row_sums(vectors, 1, of_rows) * q_factor * q_factor
    k_factor = 1.0 / gl.sqrt(row_sums(vectors, 2, of_rows) + EPS)
    k_product = row_sums(vectors, 3, of_rows) * k_factor * k_factor
    return q_factor[:, None] * (dq - q * q_product[:, None]), k_factor[:, None] * (dk - k * k_product[:, None])


@gluon.jit
def load_rows(more_ptr, cell, C: gl.constexpr, layout: gl.constexpr):
    """Return the strengths, the factors of queries and keys, and the sums of log2 decays, of a chunk of a head."""
    which = gl.arange(0, 4, layout=gl.SliceLayout(1, layout))
    offs_t = gl.arange(0, C, layout=gl.SliceLayout(0, layout))
    return gl.load(more_ptr + cell.to(gl.int64) * (5 * C) + which[:, None] * C + offs_t[None, :])


@gluon.jit
def _sum_up(
    given, C: gl.constexpr, N: gl.constexpr, P: gl.constexpr, BLOCKS: gl.constexpr, NORMALIZE: gl.constexpr,
    EPS: gl.constexpr,
):  # fmt: skip
    """Eight warps: all products."""
    (
        q_smem, k_smem, v_smem, dy_smem, u_smem, w_smem, before_smem, after_smem, pairs, ones_smem, rows_smem,
        sums_smem, vectors, full, empty, more_ptr, dg_ptr, dbeta_ptr, flags_ptr, first, count, step, seqlen, nchunks,
        ngroups, heads, scale,
    ) = given  # fmt: skip
    dtype: gl.constexpr = q_smem.dtype
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, N // 2, 16])
    acc_c: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, C // 2, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, acc_c)
    by_col: gl.constexpr = gl.SliceLayout(0, acc_c)
    of_keys: gl.constexpr = gl.SliceLayout(1, acc)
    line: gl.constexpr = gl.BlockedLayout([2], [32], [8], [0])  # every warp has all
    four: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 2], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    flat_n: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
    rows = gl.arange(0, C, layout=by_row)
    cols = gl.arange(0, C, layout=by_col)
    offs_t = gl.arange(0, C, layout=line)
    later = rows[:, None] > cols[None, :]
    reaches = rows[:, None] >= cols[None, :]
    square = gl.zeros([C, C], gl.float32, layout=acc_c)
    wide = gl.zeros([C, N], gl.float32, layout=acc)
    ones_smem.index(0).store(gl.where(reaches, 1.0, 0.0).to(dtype))
    gdc_wait()
    rows_next = load_rows(more_ptr, first * heads, C, four)
    factors = seen_as(rows_smem, gl.SwizzledSharedLayout(1, 1, 1, [0]), shape=[8, C])
    for i in range(count):
        item = first + i * step
        dq = wide
        dk = wide
        for head in range(heads):
            zero = unknown_zero()
            q_tile = q_smem.index(zero).reshape([C, N])
            k_tile = k_smem.index(zero).reshape([C, N])
            keys = k_tile.permute((1, 0))
            cell = item * heads + head
            phase = (i * heads + head) & 1
            rows_smem.index(phase).store(rows_next)
            beta_smem = factors.index(phase * 4)
            q_factor_smem = factors.index(phase * 4 + 1)
            k_factor_smem = factors.index(phase * 4 + 2)
            c_smem = factors.index(phase * 4 + 3)
            after = gl.where(head + 1 < heads, cell + 1, (first + gl.minimum(i + 1, count - 1) * step) * heads)
            rows_next = load_rows(more_ptr, after, C, four)
            last = gl.load(more_ptr + cell.to(gl.int64) * (5 * C) + 4 * C - 1)

            # What is between a token and the state before the chunk, or the one after it.
            mbarrier.wait(full.index(_MOST), phase)
            A = by_rows(square, dy_smem, u_smem, zero, C, P, BLOCKS)
            B = by_rows(square, w_smem, u_smem, zero, C, P, BLOCKS)
            part = by_state(wide, dy_smem, before_smem, zero, C, N, P, BLOCKS)
            A, B, part = warpgroup_mma_wait(0, deps=[A, B, part])
            barrier()
            mbarrier.arrive(empty.index(_DY), count=1)
            if head == 0:
                mbarrier.wait(full.index(_Q_K), i & 1)
            since = exp2(c_smem.load(of_keys))
            part = part * since[:, None]
            put_sums(sums_smem.index(_QUERIES), part * q_tile.load(acc).to(gl.float32))
            dq = dq + part

            part = by_state(wide, w_smem, before_smem, zero, C, N, P, BLOCKS)
            vectors.index(2 * _VALUES).store(_products(w_smem, v_smem, zero, C, P, BLOCKS, flat))
            part = warpgroup_mma_wait(0, deps=[part])
            barrier()
            mbarrier.arrive(empty.index(_W_V), count=1)
            part = part * (since * -1.0)[:, None]
            put_sums(sums_smem.index(_READS), part * k_tile.load(acc).to(gl.float32))
            dk = dk + part * beta_smem.load(of_keys)[:, None]

            mbarrier.wait(full.index(_AFTER), phase)
            part = by_state(wide, u_smem, after_smem, zero, C, N, P, BLOCKS)
            vectors.index(2 * _VALUES + 1).store(_products(before_smem, after_smem, zero, P, N, BLOCKS, flat_n))
            part = warpgroup_mma_wait(0, deps=[part])
            barrier()
            mbarrier.arrive(empty.index(_REST), count=1)
            part = part * exp2(last - c_smem.load(of_keys))[:, None]
            put_sums(sums_smem.index(_WRITES), part * k_tile.load(acc).to(gl.float32))
            dk = dk + part

            # What is between two tokens of the chunk: [i, j] is of a later token i.
            q_k = warpgroup_mma(q_tile, keys, square, use_acc=False, is_async=True)
            k_k = warpgroup_mma(k_tile, keys, square, use_acc=False, is_async=True)
            beta = beta_smem.load(by_row)
            q_factor = q_factor_smem.load(by_row)
            k_factor = k_factor_smem.load(by_row)
            k_col = k_factor_smem.load(by_col)
            between = c_smem.load(by_row)[:, None] - c_smem.load(by_col)[None, :]
            grown = exp2(gl.where(reaches, between, 0.0))
            A = gl.where(reaches, A * grown, 0.0)
            B = gl.where(later, B * grown * -1.0, 0.0)
            q_k, k_k = warpgroup_mma_wait(0, deps=[q_k, k_k])
            erased = B * k_k * k_factor[:, None] * k_col[None, :]
            put_sums(sums_smem.index(_STRENGTHS), erased)
            B = B * beta[:, None]
            crossing = gl.where(later, A * q_k * q_factor[:, None] * k_col[None, :] + erased * beta[:, None], 0.0)
            to_dq = pairs[0].index(zero)
            to_dk = pairs[1].index(zero)
            from_dq = pairs[2].index(zero)
            from_dk = pairs[3].index(zero)
            crossing_smem = pairs[4].index(zero)
            to_dq.store((A * k_col[None, :]).to(dtype))
            from_dq.store((A * q_factor[:, None]).to(dtype))
            to_dk.store((B * k_col[None, :]).to(dtype))
            from_dk.store((B * k_factor[:, None]).to(dtype))
            crossing_smem.store(crossing.to(dtype))
            fence_async_shared()
            barrier()
            sums = warpgroup_mma(
                ones_smem.index(zero).permute((1, 0)), crossing_smem, square, use_acc=False, is_async=True
            )
            dq = warpgroup_mma(to_dq, k_tile, dq, is_async=True)
            dk = warpgroup_mma(from_dq.permute((1, 0)), q_tile, dk, is_async=True)
            dk = warpgroup_mma(to_dk, k_tile, dk, is_async=True)
            dk = warpgroup_mma(from_dk.permute((1, 0)), k_tile, dk, is_async=True)
            sums, dq, dk = warpgroup_mma_wait(0, deps=[sums, dq, dk])
            if dg_ptr is not None:
                going = row_sums(vectors, _QUERIES, by_col) * q_factor_smem.load(by_col)
                going = going + row_sums(vectors, _READS, by_col) * k_col * beta_smem.load(by_col)
                coming = row_sums(vectors, _WRITES, by_col) * k_col
                through = gl.where(cols[None, :] >= rows[:, None], going[None, :], coming[None, :])
                put_sums(sums_smem.index(_DECAYS), through + gl.where(later, sums, 0.0))
            barrier()
            token = (item // ngroups // nchunks).to(gl.int64) * seqlen + item // ngroups % nchunks * C
            at = (token + offs_t) * (ngroups * heads) + item % ngroups * heads + head
            inside = offs_t < seqlen - item // ngroups % nchunks * C
            if dbeta_ptr is not None:
                dbeta = row_sums(vectors, _READS, line) * k_factor_smem.load(line)
                dbeta = dbeta + vectors.index(2 * _VALUES).load(line)
                gl.store(dbeta_ptr + at, dbeta + row_sums(vectors, _STRENGTHS, line), mask=inside)
            if dg_ptr is not None:
                kept = gl.sum(vectors.index(2 * _VALUES + 1).load(line), 0)
                gl.store(dg_ptr + at, row_sums(vectors, _DECAYS, line) + kept * exp2(last), mask=inside)
        dq = dq * scale
        q_tile = q_smem.index(unknown_zero()).reshape([C, N])
        k_tile = k_smem.index(unknown_zero()).reshape([C, N])
        bad = gl.where((gl.abs(dq) < float("inf")) & (gl.abs(dk) < float("inf")), 0, 1)
        gl.store(flags_ptr + item, gl.max(gl.max(bad, 1), 0))
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
def _delta_pairs_hopper_kernel(
    q_desc, k_desc, v_desc, dy_desc, u_desc, w_desc, entering_desc, leaving_desc, dq_desc, dk_desc,
    more_ptr, dg_ptr, dbeta_ptr, flags_ptr,
    seqlen, nchunks, items, ngroups, heads, scale,
    C: gl.constexpr, N: gl.constexpr, P: gl.constexpr, BLOCKS: gl.constexpr, NORMALIZE: gl.constexpr,
    EPS: gl.constexpr,
):  # fmt: skip
    """Any grid (programs): as `_delta_bwd_pairs_kernel`."""
    first = gl.program_id(0)
    step = gl.num_programs(0)
    count = gl.cdiv(items - first, step)
    dtype: gl.constexpr = q_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [1, 1, 1, C, N], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [1, 1, 1, C, N], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [BLOCKS, 1, 1, C, P], v_desc.layout)
    dy_smem = gl.allocate_shared_memory(dtype, [BLOCKS, 1, 1, C, P], dy_desc.layout)
    u_smem = gl.allocate_shared_memory(dtype, [BLOCKS, 1, 1, C, P], u_desc.layout)
    w_smem = gl.allocate_shared_memory(dtype, [BLOCKS, 1, 1, C, P], w_desc.layout)
    before_smem = gl.allocate_shared_memory(dtype, [BLOCKS, 1, 1, P, N], entering_desc.layout)
    after_smem = gl.allocate_shared_memory(dtype, [BLOCKS, 1, 1, P, N], leaving_desc.layout)
    square: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    pairs = ()
    for _ in gl.static_range(5):  # of their own: no barrier is put between writes of two of them
        pairs = append(pairs, gl.allocate_shared_memory(dtype, [1, C, C], square))
    ones_smem = gl.allocate_shared_memory(dtype, [1, C, C], square)
    rows_smem = gl.allocate_shared_memory(gl.float32, [2, 4, C], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    sums_smem = gl.allocate_shared_memory(gl.float32, [6, 2, C], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    vectors = seen_as(sums_smem, gl.SwizzledSharedLayout(1, 1, 1, [0]), shape=[12, C])
    full = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(3):
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(4):
        mbarrier.init(empty.index(i), count=1)
    # The copy engine counts on these barriers: it has to see them set up.
    fence_async_shared()
    fetch = (
        q_desc, k_desc, v_desc, dy_desc, u_desc, w_desc, entering_desc, leaving_desc, dq_desc, dk_desc, q_smem, k_smem,
        v_smem, dy_smem, u_smem, w_smem, before_smem, after_smem, full, empty, first, count, step, nchunks, ngroups,
        heads,
    )  # fmt: skip
    sums = (
        q_smem, k_smem, v_smem, dy_smem, u_smem, w_smem, before_smem, after_smem, pairs, ones_smem, rows_smem,
        sums_smem, vectors, full, empty, more_ptr, dg_ptr, dbeta_ptr, flags_ptr, first, count, step, seqlen, nchunks,
        ngroups, heads, scale,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_sum_up, (sums, C, N, P, BLOCKS, NORMALIZE, EPS)),
            (_fetch, (fetch, C, N, P, BLOCKS)),
        ],
        [1],
        [24],
    )
