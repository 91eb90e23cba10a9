"""What the delta rule prepares for each chunk, on Hopper: T, P and factors of rows, for one decay per head.

It replaces `_delta_prepare_kernel` for bfloat16, chunks of 64 tokens, at most 128 keys, and what is read being the
keys. The copy engine brings keys and queries. The inverse of the diagonal blocks of
16 x 16 never leaves the registers of a warp: it holds one of them, and multiplies by its own matrix instructions. Two
more levels are products of the whole warp group.
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

from refold.ops.triton.gluon import barrier, exp2, load_tile, seen_as, store_tile

# a times b for blocks of 16 x 16 in float16, one per warp. A thread has eight elements of each, in the order of the
# results of a matrix instruction, which is that of its left factors, too; b's blocks of 8 x 8 are transposed.
_BLOCK_PRODUCT = gl.constexpr(
    "{ .reg .b32 a<4>, b<4>; .reg .f32 z; mov.f32 z, 0f00000000;\n"
    "cvt.rn.f16x2.f32 a0, $9, $8; cvt.rn.f16x2.f32 a1, $11, $10;\n"
    "cvt.rn.f16x2.f32 a2, $13, $12; cvt.rn.f16x2.f32 a3, $15, $14;\n"
    "cvt.rn.f16x2.f32 b0, $17, $16; cvt.rn.f16x2.f32 b1, $19, $18;\n"
    "cvt.rn.f16x2.f32 b2, $21, $20; cvt.rn.f16x2.f32 b3, $23, $22;\n"
    "movmatrix.sync.aligned.m8n8.trans.b16 b0, b0; movmatrix.sync.aligned.m8n8.trans.b16 b1, b1;\n"
    "movmatrix.sync.aligned.m8n8.trans.b16 b2, b2; movmatrix.sync.aligned.m8n8.trans.b16 b3, b3;\n"
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0, $1, $2, $3}, {a0, a1, a2, a3}, {b0, b1}, {z, z, z, z};\n"
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$4, $5, $6, $7}, {a0, a1, a2, a3}, {b2, b3}, {z, z, z, z};\n"
    "}"
)
_REGISTERS = gl.constexpr(",".join(["=&f"] * 8 + ["f"] * 16))


@gluon.jit
def _block_product(a, b):
    return gl.inline_asm_elementwise(_BLOCK_PRODUCT, _REGISTERS, [a, b], gl.float32, False, 8)


@gluon.jit
def in_halves(rows, cols, level: gl.constexpr):
    """Whether two tokens lie in the two halves of a block of 2 << level."""
    return (rows >> level)[:, None] == ((cols >> level) ^ 1)[None, :]


@gluon.jit
def diagonal(square, rows, cols):
    return gl.sum(gl.where(rows[:, None] == cols[None, :], square, 0.0), 1)


@gluon.jit
def inverse_of_blocks(L, rows, cols, C: gl.constexpr):
    """Return the inverse of I - L, in float32, for its diagonal blocks of 16 x 16, zeros elsewhere."""
    acc: gl.constexpr = L.type.layout
    acc_block: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    same = (rows >> 4)[:, None] == (cols >> 4)[None, :]
    split = gl.where(same, L, 0.0).reshape([C, C // 16, 16])
    block = gl.convert_layout(gl.sum(split, 1), acc_block).to(gl.float32)  # of one element and zeros: exact
    i = gl.arange(0, C, layout=gl.SliceLayout(1, acc_block)) & 15
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, acc_block))
    X = gl.where(i[:, None] == j[None, :], 1.0, 0.0) + gl.where(in_halves(i, j, 0), block, 0.0)
    for level in gl.static_range(1, 4):
        X = X + _block_product(X, _block_product(gl.where(in_halves(i, j, level), block, 0.0), X))
    cube: gl.constexpr = split.type.layout
    zeros = gl.zeros([C, C // 16, 16], gl.float32, layout=cube)
    wide = gl.convert_layout(X, gl.SliceLayout(1, cube))[:, None, :] + zeros
    return gl.where(same, gl.convert_layout(wide.reshape([C, C]), acc), 0.0)


@gluon.jit
def inverse_by_levels(L, X, rows, cols, x_smem, y_smem, FIRST: gl.constexpr, LAST: gl.constexpr):
    """Return the inverse of I - L from that of its diagonal blocks of 1 << FIRST; see `_triton_kernels._inverse`."""
    acc: gl.constexpr = L.type.layout
    op: gl.constexpr = gl.DotOperandLayout(0, acc, 2)
    dtype: gl.constexpr = x_smem.dtype
    for level in range(FIRST, LAST):
        narrow = X.to(dtype)
        x_smem.store(narrow)
        fence_async_shared()
        barrier()
        joins = gl.where((rows >> level)[:, None] == ((cols >> level) ^ 1)[None, :], L, 0.0)
        y = gl.zeros(L.shape, gl.float32, layout=acc)
        y = warpgroup_mma(gl.convert_layout(joins, op), x_smem, y, use_acc=False, is_async=True)
        y = warpgroup_mma_wait(0, deps=[y])
        y_smem.store(y.to(dtype))
        fence_async_shared()
        barrier()
        X = warpgroup_mma(gl.convert_layout(narrow, op), y_smem, X, is_async=True)
        X = warpgroup_mma_wait(0, deps=[X])
    return X


@gluon.jit
def _lower(k_k, factor, grown, rows, cols):
    """Return L, whose difference from I is inverted; zeros where keys are not finite: from there on, all is NaN."""
    L = k_k * factor[:, None] * grown
    return gl.where((rows[:, None] > cols[None, :]) & (gl.abs(L) < float("inf")), L, 0.0)


@gluon.jit
def put(desc, row, tile, smem):
    """Let the copy engine write a tile."""
    smem.store(tile.to(smem.dtype))
    fence_async_shared()
    barrier()
    store_tile(desc, [row, 0], smem)


@gluon.jit
def _delta_prepare_hopper_kernel(
    q_desc, k_desc, T_desc, P_desc, X_desc, rows_ptr, more_ptr, flags_ptr,
    seqlen, nchunks, nheads, ngroups, scale,
    C: gl.constexpr, N: gl.constexpr, NORMALIZE: gl.constexpr, EPS: gl.constexpr, ERASE: gl.constexpr,
    VARLEN: gl.constexpr,
):  # fmt: skip
    """Grid (slots, heads): as `_delta_prepare_kernel`. Without a backward, slots without tokens are left out."""
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, acc)
    by_col: gl.constexpr = gl.SliceLayout(0, acc)
    dtype: gl.constexpr = k_desc.dtype
    slot = gl.program_id(0)
    pid_h = gl.program_id(1)
    pid_g = pid_h // (nheads // ngroups)
    k_smem = gl.allocate_shared_memory(dtype, [1, 1, C, N], k_desc.layout)
    q_smem = gl.allocate_shared_memory(dtype, [1, 1, C, N], q_desc.layout)
    T_smem = gl.allocate_shared_memory(dtype, [C, C], T_desc.layout)
    P_smem = gl.allocate_shared_memory(dtype, [C, C], P_desc.layout)
    x_smem = gl.allocate_shared_memory(gl.float16, [C, C], T_desc.layout)
    y_smem = gl.allocate_shared_memory(gl.float16, [C, C], T_desc.layout)
    factor_smem = gl.allocate_shared_memory(gl.float32, [C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    beta_smem = gl.allocate_shared_memory(gl.float32, [C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    fence_async_shared()
    barrier()
    gdc_launch_dependents()
    if VARLEN:
        gdc_wait()
        spans = flags_ptr + (gl.num_programs(0) * nheads + 2 * slot)
        row_b = slot * 0
        start = gl.load(spans)
        length = gl.load(spans + 1)
        if X_desc is None:  # noqa: SIM102 (a constant, then a value)
            if length <= 0:
                return
    else:
        row_b = slot // nchunks
        start = slot % nchunks * C
        length = gl.minimum(seqlen - start, C)
    mbarrier.expect(full, 2 * C * N * 2)
    load_tile(k_desc, [row_b, pid_g, start, 0], full, k_smem)
    load_tile(q_desc, [row_b, pid_g, start, 0], full, q_smem)
    if not VARLEN:  # queries and keys were there before the kernel of gates began
        gdc_wait()
    rows = gl.arange(0, C, layout=by_row)
    cols = gl.arange(0, C, layout=by_col)
    inside = rows < length
    cell = slot.to(gl.int64) * nheads + pid_h
    at_more = more_ptr + cell * (5 * C)
    at_rows = rows_ptr + cell * (4 * C)
    high = gl.load(at_more + 3 * C + rows)
    low = gl.load(at_more + 4 * C + rows)
    high_col = gl.load(at_more + 3 * C + cols)
    strength = gl.load(at_more + rows)
    mark = gl.load(at_rows + rows) + strength * 0.0
    total = gl.load(at_more + 4 * C - 1)
    rest = gl.load(at_more + 5 * C - 1)
    careful = gl.load(flags_ptr + cell)
    if not NORMALIZE:
        careful = careful * 0 + 1
    mbarrier.wait(full, 0)
    k_tile = k_smem.reshape([C, N])
    q_tile = q_smem.reshape([C, N])
    keys = k_tile.permute((1, 0))
    square = gl.zeros([C, C], gl.float32, layout=acc)
    k_k = warpgroup_mma(k_tile, keys, square, use_acc=False, is_async=True)
    k_factor = gl.full([C], 1.0, gl.float32, layout=by_row)
    q_factor = k_factor * scale
    if NORMALIZE:
        q_q = warpgroup_mma(q_tile, q_tile.permute((1, 0)), square, use_acc=False, is_async=True)
        k_k, q_q = warpgroup_mma_wait(0, deps=[k_k, q_q])
        q_factor = q_factor / gl.sqrt(gl.where(inside, diagonal(q_q, rows, cols), 0.0) + EPS)
    else:
        k_k = warpgroup_mma_wait(0, deps=[k_k])
    q_k = warpgroup_mma(q_tile, keys, square, use_acc=False, is_async=True)
    # Of products of rows, the diagonal has their lengths, and is not finite where a row is not.
    length_k = gl.where(inside, diagonal(k_k, rows, cols), 0.0)
    if NORMALIZE:
        k_factor = k_factor / gl.sqrt(length_k + EPS)
    factor_smem.store(k_factor)
    beta = gl.where(gl.abs(strength) < float("inf"), strength, 0.0)
    beta_smem.store(beta)
    if ERASE:
        mark = mark + length_k * 0.0
    from_start = exp2(high)
    gl.store(at_rows + rows, from_start * k_factor + mark)
    gl.store(at_rows + C + rows, from_start * q_factor)
    gl.store(at_rows + 2 * C + rows, exp2((total - high) + (rest - low)) * k_factor)
    gl.store(at_rows + 3 * C + rows, exp2(total + rows * 0.0))
    gl.store(at_more + C + rows, q_factor)
    gl.store(at_more + 2 * C + rows, k_factor)
    barrier()
    causal = rows[:, None] >= cols[None, :]
    if VARLEN:  # else a tile ends in zeros
        causal = causal & inside[:, None]
    grown = exp2(high[:, None] - high_col[None, :]) * factor_smem.load(by_col)[None, :]  # inf where it is not read
    if ERASE:  # while queries and keys are multiplied
        narrow = _lower(k_k, k_factor * beta * -1.0, grown, rows, cols).to(gl.float16)
    place = (cell * C).to(gl.int32)
    q_k = warpgroup_mma_wait(0, deps=[q_k])
    put(P_desc, place, gl.where(causal, q_k * q_factor[:, None] * grown, 0.0), P_smem)
    X = gl.where(rows[:, None] == cols[None, :], 1.0, 0.0)
    if ERASE:
        X = inverse_by_levels(narrow, inverse_of_blocks(narrow, rows, cols, C), rows, cols, x_smem, y_smem, 4, 6)
        if careful != 0:
            largest = gl.max(gl.max(gl.where(gl.abs(X) < 256.0, 0, 1), 1), 0)
            if largest > 0:  # float16 may not hold it: all once more, in bfloat16
                k_k = warpgroup_mma(k_tile, keys, square, use_acc=False, is_async=True)
                k_k = warpgroup_mma_wait(0, deps=[k_k])
                high_col = gl.load(at_more + 3 * C + cols)
                grown = exp2(high[:, None] - high_col[None, :])
                grown = grown * factor_smem.load(by_col)[None, :]
                L = _lower(k_k, k_factor * beta * -1.0, grown, rows, cols)
                X = gl.where(rows[:, None] == cols[None, :], 1.0, 0.0) + gl.where(in_halves(rows, cols, 0), L, 0.0)
                X = inverse_by_levels(
                    L.to(dtype), X, rows, cols, seen_as(x_smem, dtype=dtype), seen_as(y_smem, dtype=dtype), 1, 6
                )
    if X_desc is not None:
        put(X_desc, place, X, seen_as(x_smem, dtype=dtype))
    put(T_desc, place, X * beta_smem.load(by_col)[None, :], T_smem)
    tma.store_wait(0)
