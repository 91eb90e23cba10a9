"""What the delta rule's backward sums over pairs of tokens of a chunk, on Hopper, for one decay per head.

It replaces `_delta_bwd_queries_kernel` and `_delta_bwd_keys_kernel` for bfloat16, chunks of 64 tokens, 65 to 128 keys,
and what is read being the keys; their second launches do again what has values that are not finite. A program owns a
chunk of a group: one warp loads tiles through the copy engine, each as soon as it is free, and eight warps keep the
gradients of q and k in registers until the last head of the group. With D, the gradient of the state after the chunk,

    A = tril(dY Uᵀ)    B = -strict(W Uᵀ)    dQ = dY S + A K    dK = U D - W S + Aᵀ Q + (B + Bᵀ) K

where decays and factors of rows are left out. A and B go through shared memory, each with both of its factors.
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

from refold.ops.triton.gluon import barrier, exp2, load_tile
from refold.ops.triton.gluon import tile_layout as tile_layout

# Tiles, each with a barrier for when it is full and one for when it is empty.
_DY, _W, _V, _U, _BEFORE, _AFTER = (gl.constexpr(i) for i in range(6))


@gluon.jit
def _fetch(given, C: gl.constexpr, N: gl.constexpr, P: gl.constexpr, BLOCKS: gl.constexpr):
    """One warp: keys and queries once, then the tiles of each head, BLOCKS times P values."""
    (
        q_desc, k_desc, v_desc, dy_desc, u_desc, w_desc, entering_desc, leaving_desc, q_smem, k_smem, v_smem, dy_smem,
        u_smem, w_smem, before_smem, after_smem, ready, full, empty, batch, start, pid_g, cell, heads,
    ) = given  # fmt: skip
    gdc_wait()
    mbarrier.expect(ready, 2 * C * N * 2)
    load_tile(k_desc, [batch, pid_g, start, 0], ready, k_smem)
    load_tile(q_desc, [batch, pid_g, start, 0], ready, q_smem)
    for head in range(heads):
        pid_h = pid_g * heads + head
        row = (cell + head) * C
        for tile in gl.static_range(6):
            mbarrier.wait(empty.index(tile), (head & 1) ^ 1)
            bar = full.index(tile)
            mbarrier.expect(bar, BLOCKS * P * (C if tile < 4 else N) * 2)
            for block in gl.static_range(BLOCKS):
                at = block * P
                if tile == _DY:
                    load_tile(dy_desc, [batch, pid_h, start, at], bar, dy_smem.index(block))
                elif tile == _W:
                    load_tile(w_desc, [0, 0, row, at], bar, w_smem.index(block))
                elif tile == _V:
                    load_tile(v_desc, [batch, pid_h, start, at], bar, v_smem.index(block))
                elif tile == _U:
                    load_tile(u_desc, [0, 0, row, at], bar, u_smem.index(block))
                elif tile == _BEFORE:
                    load_tile(entering_desc, [0, cell + head, at, 0], bar, before_smem.index(block))
                else:
                    load_tile(leaving_desc, [0, cell + head, at, 0], bar, after_smem.index(block))


@gluon.jit
def _by_state(acc, tokens_smem, state_smem, C: gl.constexpr, N: gl.constexpr, P: gl.constexpr, BLOCKS: gl.constexpr):
    """Start adding the product of rows of values with a state."""
    for block in gl.static_range(BLOCKS):
        state = state_smem.index(block).reshape([P, N])
        acc = warpgroup_mma(tokens_smem.index(block).reshape([C, P]), state, acc, is_async=True)
    return acc


@gluon.jit
def _by_rows(acc, left_smem, right_smem, C: gl.constexpr, P: gl.constexpr, BLOCKS: gl.constexpr):
    """Start adding the products of rows of values with one another."""
    for block in gl.static_range(BLOCKS):
        right = right_smem.index(block).reshape([C, P]).permute((1, 0))
        acc = warpgroup_mma(left_smem.index(block).reshape([C, P]), right, acc, is_async=True)
    return acc


@gluon.jit
def _products(a_smem, b_smem, R: gl.constexpr, M: gl.constexpr, BLOCKS: gl.constexpr, layout: gl.constexpr):
    """Return the sums of the rows of two tiles, multiplied element by element."""
    total = gl.zeros([R], gl.float32, layout=gl.SliceLayout(1, layout))
    for block in gl.static_range(BLOCKS):
        a = a_smem.index(block).reshape([R, M]).load(layout).to(gl.float32)
        total = total + gl.sum(a * b_smem.index(block).reshape([R, M]).load(layout).to(gl.float32), 1)
    return total


@gluon.jit
def _unit_gradient(tile, gradient, EPS: gl.constexpr):
    """Return the gradient of rows that were divided by their lengths, from that of the quotients."""
    factor = 1.0 / gl.sqrt(gl.sum(tile * tile, 1) + EPS)
    product = gl.sum(tile * gradient, 1) * factor * factor
    return factor[:, None] * (gradient - tile * product[:, None])


@gluon.jit
def _sum_up(
    given, C: gl.constexpr, N: gl.constexpr, P: gl.constexpr, BLOCKS: gl.constexpr, NORMALIZE: gl.constexpr,
    EPS: gl.constexpr,
):  # fmt: skip
    """Eight warps: all products."""
    (
        q_smem, k_smem, v_smem, dy_smem, u_smem, w_smem, before_smem, after_smem, pair_smem, ready, full, empty,
        more_ptr, dq_ptr, dk_ptr, dg_ptr, dbeta_ptr, flags_ptr, flag, token, cell, pid_g, length, scale, heads, nheads,
        ngroups, nkeys,
    ) = given  # fmt: skip
    dtype: gl.constexpr = q_smem.dtype
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, N // 2, 16])
    acc_c: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, C // 2, 16])
    op_c: gl.constexpr = gl.DotOperandLayout(0, acc_c, 2)
    by_row: gl.constexpr = gl.SliceLayout(1, acc_c)
    by_col: gl.constexpr = gl.SliceLayout(0, acc_c)
    of_keys: gl.constexpr = gl.SliceLayout(1, acc)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    flat_n: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
    rows = gl.arange(0, C, layout=by_row)
    cols = gl.arange(0, C, layout=by_col)
    tokens = gl.arange(0, C, layout=of_keys)
    later = rows[:, None] > cols[None, :]
    q_tile = q_smem.reshape([C, N])
    k_tile = k_smem.reshape([C, N])
    keys = k_tile.permute((1, 0))
    square = gl.zeros([C, C], gl.float32, layout=acc_c)
    wide = gl.zeros([C, N], gl.float32, layout=acc)
    dq = wide
    dk = wide
    gdc_wait()
    mbarrier.wait(ready, 0)
    for head in range(heads):
        phase = head & 1
        more = more_ptr + (cell + head).to(gl.int64) * (5 * C)
        c = gl.load(more + 3 * C + tokens)
        last = gl.load(more + 4 * C - 1)
        since = exp2(c)

        # What is between a token and the state before the chunk, or the one after it.
        mbarrier.wait(full.index(_DY), phase)
        mbarrier.wait(full.index(_W), phase)
        mbarrier.wait(full.index(_U), phase)
        A = _by_rows(square, dy_smem, u_smem, C, P, BLOCKS)
        B = _by_rows(square, w_smem, u_smem, C, P, BLOCKS)
        mbarrier.wait(full.index(_BEFORE), phase)
        part = _by_state(wide, dy_smem, before_smem, C, N, P, BLOCKS)
        A, B, part = warpgroup_mma_wait(0, deps=[A, B, part])
        barrier()
        mbarrier.arrive(empty.index(_DY), count=1)
        part = part * since[:, None]
        queries = gl.sum(part * q_tile.load(acc).to(gl.float32), 1)
        dq = dq + part

        part = _by_state(wide, w_smem, before_smem, C, N, P, BLOCKS)
        mbarrier.wait(full.index(_V), phase)
        w_v = _products(w_smem, v_smem, C, P, BLOCKS, flat)
        part = warpgroup_mma_wait(0, deps=[part])
        barrier()
        mbarrier.arrive(empty.index(_W), count=1)
        mbarrier.arrive(empty.index(_V), count=1)
        part = part * (since * -1.0)[:, None]
        reads = gl.sum(part * k_tile.load(acc).to(gl.float32), 1)
        dk = dk + part * gl.load(more + tokens)[:, None]

        mbarrier.wait(full.index(_AFTER), phase)
        part = _by_state(wide, u_smem, after_smem, C, N, P, BLOCKS)
        kept = gl.sum(_products(before_smem, after_smem, P, N, BLOCKS, flat_n), 0)
        part = warpgroup_mma_wait(0, deps=[part])
        barrier()
        mbarrier.arrive(empty.index(_U), count=1)
        mbarrier.arrive(empty.index(_BEFORE), count=1)
        mbarrier.arrive(empty.index(_AFTER), count=1)
        part = part * exp2(last - c)[:, None]
        writes = gl.sum(part * k_tile.load(acc).to(gl.float32), 1)
        dk = dk + part

        # What is between two tokens of the chunk: [i, j] is of a later token i.
        beta = gl.load(more + rows)
        q_factor = gl.load(more + C + rows)
        k_factor = gl.load(more + 2 * C + rows)
        k_col = gl.load(more + 2 * C + cols)
        q_k = warpgroup_mma(q_tile, keys, square, use_acc=False, is_async=True)
        k_k = warpgroup_mma(k_tile, keys, square, use_acc=False, is_async=True)
        between = gl.load(more + 3 * C + rows)[:, None] - gl.load(more + 3 * C + cols)[None, :]
        reaches = rows[:, None] >= cols[None, :]
        grown = exp2(gl.where(reaches, between, 0.0))
        A = gl.where(reaches, A * grown, 0.0)
        B = gl.where(later, B * grown * -1.0, 0.0)
        q_k, k_k = warpgroup_mma_wait(0, deps=[q_k, k_k])
        erased = B * k_k * k_factor[:, None] * k_col[None, :]
        dbeta = gl.sum(erased, 1)
        B = B * beta[:, None]
        crossing = gl.where(later, A * q_k * q_factor[:, None] * k_col[None, :] + erased * beta[:, None], 0.0)
        pair_smem.index(0).store((A * k_col[None, :]).to(dtype))
        pair_smem.index(1).store((A * q_factor[:, None]).to(dtype))
        pair_smem.index(2).store((B * k_col[None, :]).to(dtype))
        pair_smem.index(3).store((B * k_factor[:, None]).to(dtype))
        pair_smem.index(4).store(crossing.to(dtype))
        fence_async_shared()
        barrier()
        ones = gl.where(cols[None, :] >= rows[:, None], 1.0, 0.0).to(dtype)
        sums = warpgroup_mma(gl.convert_layout(ones, op_c), pair_smem.index(4), square, use_acc=False, is_async=True)
        dq = warpgroup_mma(pair_smem.index(0), k_tile, dq, is_async=True)
        dk = warpgroup_mma(pair_smem.index(1).permute((1, 0)), q_tile, dk, is_async=True)
        dk = warpgroup_mma(pair_smem.index(2), k_tile, dk, is_async=True)
        dk = warpgroup_mma(pair_smem.index(3).permute((1, 0)), k_tile, dk, is_async=True)
        at = (token + rows) * nheads + pid_g * heads + head
        inside = rows < length
        if dbeta_ptr is not None:
            dbeta = dbeta + gl.convert_layout(reads, by_row) * k_factor + gl.convert_layout(w_v, by_row)
            gl.store(dbeta_ptr + at, dbeta, mask=inside)
        sums, dq, dk = warpgroup_mma_wait(0, deps=[sums, dq, dk])
        if dg_ptr is not None:
            after = gl.convert_layout(queries, by_col) * gl.load(more + C + cols)
            after = after + gl.convert_layout(reads, by_col) * k_col * gl.load(more + cols)
            before = gl.convert_layout(writes, by_col) * k_col
            through = gl.where(cols[None, :] >= rows[:, None], after[None, :], before[None, :])
            dg = gl.sum(through + gl.where(later, sums, 0.0), 1) + kept * exp2(last)
            gl.store(dg_ptr + at, dg, mask=inside)
        barrier()
    dq = dq * scale
    bad = gl.where((gl.abs(dq) < float("inf")) & (gl.abs(dk) < float("inf")), 0, 1)
    gl.store(flags_ptr + flag, gl.max(gl.max(bad, 1), 0))
    if NORMALIZE:
        dq = _unit_gradient(q_tile.load(acc).to(gl.float32), dq, EPS)
        dk = _unit_gradient(k_tile.load(acc).to(gl.float32), dk, EPS)
    offs_n = gl.arange(0, N, layout=gl.SliceLayout(0, acc))
    at = ((token + tokens) * ngroups + pid_g)[:, None] * nkeys + offs_n[None, :]
    inside = (tokens < length)[:, None] & (offs_n < nkeys)[None, :]
    gl.store(dq_ptr + at, dq.to(dtype), mask=inside)
    gl.store(dk_ptr + at, dk.to(dtype), mask=inside)


@gluon.jit
def _delta_pairs_hopper_kernel(
    q_desc, k_desc, v_desc, dy_desc, u_desc, w_desc, entering_desc, leaving_desc,
    more_ptr, dq_ptr, dk_ptr, dg_ptr, dbeta_ptr, flags_ptr,
    seqlen, nchunks, nheads, ngroups, nkeys, scale,
    C: gl.constexpr, N: gl.constexpr, P: gl.constexpr, BLOCKS: gl.constexpr, NORMALIZE: gl.constexpr,
    EPS: gl.constexpr,
):  # fmt: skip
    """Grid (chunks, groups): as `_delta_bwd_queries_kernel` and `_delta_bwd_keys_kernel` after it."""
    slot = gl.program_id(0)
    pid_g = gl.program_id(1)
    heads = nheads // ngroups
    batch = slot // nchunks
    start = slot % nchunks * C
    cell = slot * nheads + pid_g * heads
    token = batch.to(gl.int64) * seqlen + start
    flag = slot.to(gl.int64) * ngroups + pid_g
    dtype: gl.constexpr = q_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [1, 1, C, N], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [1, 1, C, N], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [BLOCKS, 1, 1, C, P], v_desc.layout)
    dy_smem = gl.allocate_shared_memory(dtype, [BLOCKS, 1, 1, C, P], dy_desc.layout)
    u_smem = gl.allocate_shared_memory(dtype, [BLOCKS, 1, 1, C, P], u_desc.layout)
    w_smem = gl.allocate_shared_memory(dtype, [BLOCKS, 1, 1, C, P], w_desc.layout)
    before_smem = gl.allocate_shared_memory(dtype, [BLOCKS, 1, 1, P, N], entering_desc.layout)
    after_smem = gl.allocate_shared_memory(dtype, [BLOCKS, 1, 1, P, N], leaving_desc.layout)
    pair_smem = gl.allocate_shared_memory(dtype, [5, C, C], gl.NVMMASharedLayout(128, 16, 2))
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [6, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [6, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    for i in gl.static_range(6):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    # The copy engine counts on these barriers: it has to see them set up.
    fence_async_shared()
    fetch = (
        q_desc, k_desc, v_desc, dy_desc, u_desc, w_desc, entering_desc, leaving_desc, q_smem, k_smem, v_smem, dy_smem,
        u_smem, w_smem, before_smem, after_smem, ready, full, empty, batch, start, pid_g, cell, heads,
    )  # fmt: skip
    sums = (
        q_smem, k_smem, v_smem, dy_smem, u_smem, w_smem, before_smem, after_smem, pair_smem, ready, full, empty,
        more_ptr, dq_ptr, dk_ptr, dg_ptr, dbeta_ptr, flags_ptr, flag, token, cell, pid_g, seqlen - start, scale, heads,
        nheads, ngroups, nkeys,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_sum_up, (sums, C, N, P, BLOCKS, NORMALIZE, EPS)),
            (_fetch, (fetch, C, N, P, BLOCKS)),
        ],
        [1],
        [24],
    )
