"""What the delta rule prepares for each chunk, on Hopper, for one decay per key: T, P, and keys times their decays.

It replaces `_delta_decay_kernel` and `_delta_prepare_keyed_kernel` for bfloat16, chunks of 64 tokens, at most 128 keys,
and what is read being the keys. A warp has 16 tokens, and a thread all 16 of some keys: it sums their log decays by
itself, and what is between two blocks of 16 comes from sums of whole blocks. So nothing is a difference of large sums,
float32 is enough, and the sums since the chunk's start are written only where a backward reads them.

Products of keys are of what the copy engine brings, times decays, in the order of `_delta_prepare_keyed_kernel`; the
factors that normalise are put to their results.
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

from refold.ops.delta_rule._gluon_prepare_kernels import diagonal, in_halves, inverse_by_levels, inverse_of_blocks, put
from refold.ops.triton.gluon import append, barrier, exp2, load_tile, offset, seen_as, sigmoid, softplus, store_tile

_LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _share(v):
    """As `_triton_kernels.share`."""
    return gl.where(v == float("-inf"), 0.0, sigmoid(gl.where(v < -80.0, -80.0, v)))


@gluon.jit
def _log_decay(g, A, lower, GATE: gl.constexpr, FLOOR: gl.constexpr):
    """As `_triton_kernels.log_decay`, of a gate with its bias."""
    if GATE == "softplus":
        g = softplus(g) * (exp2(A * _LOG2E) * -1.0)
    elif GATE == "bounded":
        g = _share(g) * lower
    elif GATE == "bounded_A":
        g = _share(exp2(A * _LOG2E) * g) * lower
    return gl.where(g < FLOOR, FLOOR, g)


@gluon.jit
def _log2_decays(
    pointers, mask, A, bias, lower, GATE: gl.constexpr, BIAS: gl.constexpr, FLOOR: gl.constexpr
):  # fmt: skip
    """Load gates and return their log2 decays, zero where ``mask`` is not set."""
    g = gl.load(pointers, mask=mask, other=0.0).to(gl.float32)
    if BIAS:
        g = g + bias[None, :][:, None, :]
    g = _log_decay(g, A[None, :][:, None, :], lower, GATE, FLOOR) * _LOG2E
    if BIAS or GATE != "log":
        g = gl.where(mask, g, 0.0)
    return g


@gluon.jit
def _running(g, LAYOUT: gl.constexpr):
    """Sum log decays between each token of a block of 16 and its ninth.

    Returns the sums; those of the first token and of the last once more; and the decay of the first token. All tokens
    of a block are in one thread, so taking them apart moves nothing.
    """
    N: gl.constexpr = g.shape[2]
    parts = append((), g)
    for level in gl.static_range(4):
        halves = ()
        for i in gl.static_range(1 << level):
            a, b = gl.split(parts[i].reshape([4, 2, 8 >> level, N]).permute((0, 2, 3, 1)))
            halves = append(append(halves, a), b)
        parts = halves
    total = parts[8] * 0.0
    sums = append((), total)
    for i in gl.static_range(8):
        total = total - parts[8 - i]
        sums = (total,) + sums  # noqa: RUF005
    total = parts[9]
    sums = append(sums, total)
    for i in gl.static_range(10, 16):
        total = total + parts[i]
        sums = append(sums, total)
    of_keys: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    first = gl.convert_layout(sums[0].reshape([4, N]), of_keys, assert_trivial=True)
    last = gl.convert_layout(sums[15].reshape([4, N]), of_keys, assert_trivial=True)
    opening = gl.convert_layout(parts[0].reshape([4, N]), of_keys, assert_trivial=True)
    for level in gl.static_range(4):
        joined = ()
        for i in gl.static_range(8 >> level):
            both = gl.join(sums[2 * i], sums[2 * i + 1]).permute((0, 3, 1, 2))
            joined = append(joined, both.reshape([4, 2 << level, N]))
        sums = joined
    return gl.convert_layout(sums[0], LAYOUT, assert_trivial=True), first, last, opening


@gluon.jit
def _wide(tile, LAYOUT: gl.constexpr):
    """Load a tile of shared memory in blocks of 16 tokens, in float32."""
    C: gl.constexpr = tile.shape[0]
    N: gl.constexpr = tile.shape[1]
    flat: gl.constexpr = gl.BlockedLayout([16, N // 32], [1, 32], [4, 1], [1, 0])
    blocks = tile.load(flat).reshape([4, C // 4, N])
    return gl.convert_layout(blocks, LAYOUT, assert_trivial=True).to(gl.float32)


@gluon.jit
def _keep(tile, value):
    """Store what `_wide` loads."""
    tile.store(value.to(tile.dtype).reshape(tile.shape))


@gluon.jit
def _level(grown, q_tile, k_tile, a_smem, b_smem, P, L, rows, cols, level, LAYOUT: gl.constexpr, ERASE: gl.constexpr):
    """Put products of neighbouring blocks of 1 << level tokens into P and L; ``grown`` leads to their reference."""
    acc: gl.constexpr = P.type.layout
    _keep(a_smem, _wide(q_tile, LAYOUT) * grown)
    _keep(b_smem, _wide(k_tile, LAYOUT) * grown)
    fence_async_shared()
    barrier()
    square = gl.zeros(P.shape, gl.float32, layout=acc)
    keys = b_smem.permute((1, 0))
    pairs = in_halves(rows, cols, level)
    part = warpgroup_mma(a_smem, keys, square, use_acc=False, is_async=True)
    if ERASE:
        other = warpgroup_mma(b_smem, keys, square, use_acc=False, is_async=True)
        part, other = warpgroup_mma_wait(0, deps=[part, other])
        L = gl.where(pairs, other, L)
    else:
        part = warpgroup_mma_wait(0, deps=[part])
    barrier()
    return gl.where(pairs, part, P), L


@gluon.jit
def _slot_span(cu_seqlens_ptr, slot, seqlen, nchunks, nseqs, C: gl.constexpr, VARLEN: gl.constexpr):
    """As `slot_span` of `_triton_kernels`."""
    row = slot // nchunks
    start = slot % nchunks * C
    length = gl.minimum(seqlen - start, C)
    if VARLEN:
        row = slot * 0
        low = slot * 0
        high = low + nseqs
        while high - low > 1:
            middle = (low + high) // 2
            if offset(cu_seqlens_ptr, middle, seqlen) // C + middle > slot:
                high = middle
            else:
                low = middle
        begin = offset(cu_seqlens_ptr, low, seqlen)
        end = gl.maximum(offset(cu_seqlens_ptr, low + 1, seqlen), begin)
        start = begin + (slot - begin // C - low) * C
        length = gl.minimum(end - start, C)
        if start < begin:
            length = slot * 0
    return row, start, length


@gluon.jit
def _delta_prepare_keyed_hopper_kernel(
    q_desc, k_desc, T_desc, P_desc, X_desc, Q_desc, R_desc, K_desc,
    g_ptr, A_ptr, bias_ptr, beta_ptr, cu_seqlens_ptr, c_ptr, rows_ptr, decay_ptr, more_ptr,
    seqlen, nchunks, nseqs, nheads, ngroups, nkeys, scale, lower, beta_limit,
    stride_g_b, stride_g_t, stride_g_h, stride_g_n, stride_bias_h, stride_bias_n,
    stride_beta_b, stride_beta_t, stride_beta_h,
    C: gl.constexpr, N: gl.constexpr, NORMALIZE: gl.constexpr, EPS: gl.constexpr, FLOOR: gl.constexpr,
    NEAR: gl.constexpr, ERASE: gl.constexpr, GATE: gl.constexpr, BETA: gl.constexpr, VARLEN: gl.constexpr,
):  # fmt: skip
    """Grid (slots, heads): as `_delta_decay_kernel` and `_delta_prepare_keyed_kernel`.

    Without ``more``, c is written only where 16 tokens decay too much for one reference, for this kernel itself.
    """
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, acc)
    by_col: gl.constexpr = gl.SliceLayout(0, acc)
    cube: gl.constexpr = gl.BlockedLayout([1, 16, N // 32], [1, 1, 32], [4, 1, 1], [2, 1, 0])
    of_rows: gl.constexpr = gl.SliceLayout(2, cube)
    of_keys: gl.constexpr = gl.SliceLayout(1, cube)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    matrix: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    dtype: gl.constexpr = k_desc.dtype
    slot = gl.program_id(0)
    pid_h = gl.program_id(1)
    pid_g = pid_h // (nheads // ngroups)
    k_smem = gl.allocate_shared_memory(dtype, [1, 1, C, N], k_desc.layout)
    q_smem = gl.allocate_shared_memory(dtype, [1, 1, C, N], q_desc.layout)
    r_smem = gl.allocate_shared_memory(dtype, [1, 1, C, N], R_desc.layout)
    a_smem = gl.allocate_shared_memory(dtype, [C, N], T_desc.layout)
    b_smem = gl.allocate_shared_memory(dtype, [C, N], T_desc.layout)
    T_smem = gl.allocate_shared_memory(dtype, [C, C], T_desc.layout)
    P_smem = gl.allocate_shared_memory(dtype, [C, C], P_desc.layout)
    whole_smem = gl.allocate_shared_memory(gl.float32, [4, N], matrix)
    opening_smem = gl.allocate_shared_memory(gl.float32, [4, N], matrix)
    marks_smem = gl.allocate_shared_memory(gl.float32, [4, C // 4], matrix)
    own_smem = gl.allocate_shared_memory(gl.float32, [4, C // 4], matrix)
    q_factor_smem = gl.allocate_shared_memory(gl.float32, [4, C // 4], matrix)
    k_factor_smem = gl.allocate_shared_memory(gl.float32, [4, C // 4], matrix)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    fence_async_shared()
    barrier()
    gdc_wait()
    row_b, start, length = _slot_span(cu_seqlens_ptr, slot, seqlen, nchunks, nseqs, C, VARLEN)
    start = gl.minimum(gl.maximum(start, 0), seqlen)
    mbarrier.expect(full, 2 * C * N * 2)
    load_tile(k_desc, [row_b, pid_g, start, 0], full, k_smem)
    load_tile(q_desc, [row_b, pid_g, start, 0], full, q_smem)
    cell = slot.to(gl.int64) * nheads + pid_h

    # Log decays, summed over the tokens of each block of 16.
    block = gl.arange(0, 4, layout=gl.SliceLayout(1, of_rows))
    token = block[:, None] * 16 + gl.arange(0, 16, layout=gl.SliceLayout(0, of_rows))[None, :]
    key = gl.arange(0, N, layout=gl.SliceLayout(0, of_keys))
    column = key[None, :][:, None, :]
    live = (token < length)[:, :, None]
    mask = live & (column < nkeys)
    g_rows = g_ptr + row_b.to(gl.int64) * stride_g_b + start.to(gl.int64) * stride_g_t + pid_h * stride_g_h
    gates = g_rows + token[:, :, None] * stride_g_t + column * stride_g_n
    BIAS: gl.constexpr = bias_ptr is not None
    bias = key * 0.0
    if BIAS:
        bias = gl.load(bias_ptr + pid_h * stride_bias_h + key * stride_bias_n, mask=key < nkeys, other=0.0)
        bias = bias.to(gl.float32)
    A = key * 0.0
    if A_ptr is not None:
        A = gl.load(A_ptr + pid_h + key * 0).to(gl.float32)
    zeros = gl.zeros([4, C // 4], gl.float32, layout=of_rows)
    marks_smem.store(zeros)
    own_smem.store(zeros)
    s, first, last, opening = _running(_log2_decays(gates, mask, A, bias, lower, GATE, BIAS, FLOOR), cube)
    whole = last - first + opening
    if gl.max(gl.max(gl.where(gl.abs(whole) < float("inf"), 0.0, 1.0), 1), 0) > 0.0:
        g = _log2_decays(gates, mask, A, bias, lower, GATE, BIAS, FLOOR)
        spoilt = gl.where(gl.abs(g) < float("inf"), 0.0, 1.0)
        marks_smem.store(gl.where(gl.max(spoilt, 2) > 0.0, float("nan"), 0.0))
        s, first, last, opening = _running(gl.where(gl.abs(g) < float("inf"), g, 0.0), cube)
        whole = last - first + opening
    whole_smem.store(whole)
    opening_smem.store(opening)
    most = gl.max(gl.abs(s), 1)
    largest = gl.max(gl.max(most, 1), 0)
    barrier()
    wholes = seen_as(whole_smem, vector)
    openings = seen_as(opening_smem, vector)
    by_key: gl.constexpr = gl.SliceLayout(0, of_keys)
    whole_0 = wholes.index(0).load(by_key)
    whole_1 = wholes.index(1).load(by_key)
    whole_2 = wholes.index(2).load(by_key)
    whole_3 = wholes.index(3).load(by_key)
    opening_2 = openings.index(2).load(by_key)
    number = gl.arange(0, 4, layout=gl.SliceLayout(1, of_keys))[:, None]
    # What is added to `s`, or to -s, between a token and: the chunk's start, its end, and the first token of the later
    # one of two neighbouring blocks, of 16 or of 32.
    from_start = gl.where(number > 2, whole_2[None, :], 0.0) + gl.where(number > 1, whole_1[None, :], 0.0)
    from_start = from_start + gl.where(number > 0, whole_0[None, :], 0.0) + (opening - first)
    to_end = gl.where(number < 1, whole_1[None, :], 0.0) + gl.where(number < 2, whole_2[None, :], 0.0)
    to_end = to_end + gl.where(number < 3, whole_3[None, :], 0.0) + last
    next_one = gl.where(number == 0, openings.index(1).load(by_key)[None, :], openings.index(3).load(by_key)[None, :])
    at_16 = gl.where(number % 2 == 1, first * -1.0, last + next_one)
    later = gl.where(number == 3, (opening - first) + (whole_2 - opening_2)[None, :], first * -1.0)
    earlier = gl.where(number == 0, whole_1[None, :], 0.0) + opening_2[None, :] + last
    at_32 = gl.where(number > 1, later, earlier)
    to_middle = gl.where(number > 1, later, earlier * -1.0)
    close = gl.max(gl.max(most + gl.abs(to_middle), 1), 0) < NEAR
    decay = exp2(whole_0 + whole_1 + whole_2 + whole_3)
    gl.store(decay_ptr + cell * nkeys + key, decay, mask=key < nkeys)
    c_rows = c_ptr + cell * C * nkeys
    if more_ptr is not None:
        gl.store(c_rows + token[:, :, None] * nkeys + column, s + from_start[:, None, :], mask=column < nkeys)

    # Strengths, keys and queries.
    rows = gl.arange(0, C, layout=by_row)
    cols = gl.arange(0, C, layout=by_col)
    inside = rows < length
    beta = gl.where(inside, 1.0, 0.0)
    if BETA != "one":
        beta_rows = beta_ptr + row_b.to(gl.int64) * stride_beta_b + start.to(gl.int64) * stride_beta_t
        beta = gl.load(beta_rows + pid_h * stride_beta_h + rows * stride_beta_t, mask=inside, other=0.0).to(gl.float32)
        if BETA == "sigmoid":
            beta = gl.where(inside, _share(beta) * beta_limit, 0.0)
    strength = gl.where(gl.abs(beta) < float("inf"), beta, float("nan"))
    beta = gl.where(gl.abs(beta) < float("inf"), beta, 0.0)
    mbarrier.wait(full, 0)
    k_tile = k_smem.reshape([C, N])
    q_tile = q_smem.reshape([C, N])
    r_tile = r_smem.reshape([C, N])
    if VARLEN:  # noqa: SIM102 (a constant, then a value)
        if length < C:  # the next sequence begins here
            _keep(k_tile, gl.where(live, _wide(k_tile, cube), 0.0))
            _keep(q_tile, gl.where(live, _wide(q_tile, cube), 0.0))
            fence_async_shared()
            barrier()
    keys = k_tile.permute((1, 0))
    square = gl.zeros([C, C], gl.float32, layout=acc)
    q_factor = gl.full([C], 1.0, gl.float32, layout=by_row) * scale
    k_factor = gl.full([C], 1.0, gl.float32, layout=by_row)
    if NORMALIZE:
        q_q = warpgroup_mma(q_tile, q_tile.permute((1, 0)), square, use_acc=False, is_async=True)
        k_k = warpgroup_mma(k_tile, keys, square, use_acc=False, is_async=True)
        q_q, k_k = warpgroup_mma_wait(0, deps=[q_q, k_k])
        q_factor = q_factor / gl.sqrt(diagonal(q_q, rows, cols) + EPS)
        length_k = diagonal(k_k, rows, cols)
    elif ERASE:
        k_k = warpgroup_mma(k_tile, keys, square, use_acc=False, is_async=True)
        k_k = warpgroup_mma_wait(0, deps=[k_k])
        length_k = diagonal(k_k, rows, cols)
    if ERASE:  # noqa: SIM102 (else what is not finite in a key stays in its row of the state)
        if gl.max(gl.where(length_k < float("inf"), 0.0, 1.0), 0) > 0.0:
            wide = _wide(k_tile, cube)
            spoilt = gl.where(gl.abs(wide) < float("inf"), 0.0, 1.0)
            wide = gl.where(gl.abs(wide) < float("inf"), wide, 0.0)
            own_smem.store(gl.where(gl.max(spoilt, 2) > 0.0, float("nan"), 0.0))
            k_factor_smem.store(gl.sum(wide * wide, 2))
            _keep(k_tile, wide)
            fence_async_shared()
            barrier()
            length_k = seen_as(k_factor_smem, vector, shape=[C]).load(by_row)
            barrier()
    if NORMALIZE:
        k_factor = k_factor / gl.sqrt(length_k + EPS)
    own = seen_as(own_smem, vector, shape=[C]).load(by_row)
    seen_as(q_factor_smem, vector, shape=[C]).store(q_factor)
    seen_as(k_factor_smem, vector, shape=[C]).store(k_factor)
    mark = seen_as(marks_smem, vector, shape=[C]).load(by_row) + own + strength * 0.0
    at_rows = rows_ptr + cell * (4 * C)
    gl.store(at_rows + rows, mark + 1.0)
    gl.store(at_rows + C + rows, rows * 0.0 + 1.0)
    gl.store(at_rows + 2 * C + rows, rows * 0.0 + 1.0)
    if more_ptr is not None:
        at_more = more_ptr + cell * (5 * C)
        gl.store(at_more + rows, strength)
        gl.store(at_more + C + rows, q_factor)
        gl.store(at_more + 2 * C + rows, k_factor)

    # Products of tokens, without the factors that normalise them.
    P = warpgroup_mma(q_tile, keys, square, use_acc=False, is_async=True)
    P = warpgroup_mma_wait(0, deps=[P])
    P = gl.where(rows[:, None] == cols[None, :], P + own[:, None], 0.0)
    L = square
    level_0 = slot * 0 + 4
    if largest < NEAR:
        # One reference for 16 tokens; for all 64, if their decays allow it.
        level_0 = gl.where(close, 6, 4)
        between = s + gl.where(close, to_middle, 0.0)[:, None, :]
        _keep(b_smem, _wide(k_tile, cube) * exp2(between * -1.0))
        grown = exp2(between)
        _keep(a_smem, _wide(q_tile, cube) * grown)
        near = (rows[:, None] >> level_0 == cols[None, :] >> level_0) & (rows[:, None] > cols[None, :])
        if ERASE:
            _keep(r_tile, _wide(k_tile, cube) * grown)
        fence_async_shared()
        barrier()
        part = warpgroup_mma(a_smem, b_smem.permute((1, 0)), square, use_acc=False, is_async=True)
        if ERASE:
            L = warpgroup_mma(r_tile, b_smem.permute((1, 0)), square, use_acc=False, is_async=True)
            part, L = warpgroup_mma_wait(0, deps=[part, L])
        else:
            part = warpgroup_mma_wait(0, deps=[part])
        P = gl.where(near, part, P)
        barrier()
    else:
        c = s + from_start[:, None, :]
        gl.store(c_rows + token[:, :, None] * nkeys + column, c, mask=column < nkeys)
        barrier()
        for level in range(0, 4):
            reference = ((token >> level >> 1) * 2 + 1) << level
            c = s + from_start[:, None, :]
            of_reference = c_rows + reference[:, :, None] * nkeys + column
            between = c - gl.load(of_reference, mask=column < nkeys, other=0.0)
            grown = exp2(gl.where((token >> level & 1 == 1)[:, :, None], between, between * -1.0))
            P, L = _level(grown, q_tile, k_tile, a_smem, b_smem, P, L, rows, cols, level, cube, ERASE)
    for level in range(level_0, 6):
        sign = gl.where(block >> (level - 4) & 1 == 1, 1.0, -1.0)[:, None][:, :, None]
        to_reference = gl.where(number * 0 + level == 4, at_16, at_32)
        grown = exp2(s * sign + to_reference[:, None, :])
        P, L = _level(grown, q_tile, k_tile, a_smem, b_smem, P, L, rows, cols, level, cube, ERASE)

    # Factors to and from the ends of the chunk.
    place = (cell * C).to(gl.int32)
    causal = rows[:, None] >= cols[None, :]
    k_col = seen_as(k_factor_smem, vector, shape=[C]).load(by_col)
    P_smem.store(gl.where(causal, P * q_factor[:, None] * k_col[None, :], 0.0).to(dtype))
    k_rows = k_factor_smem.load(of_rows)
    grown = exp2(s + from_start[:, None, :])
    _keep(q_tile, _wide(q_tile, cube) * q_factor_smem.load(of_rows)[:, :, None] * grown)
    wide = _wide(k_tile, cube)
    if ERASE:
        _keep(r_tile, wide * k_rows[:, :, None] * grown)
    shrunk = exp2(to_end[:, None, :] - s)
    _keep(k_tile, wide * (k_rows + own_smem.load(of_rows))[:, :, None] * shrunk)
    fence_async_shared()
    barrier()
    store_tile(P_desc, [place, 0], P_smem)
    store_tile(Q_desc, [0, 0, place, 0], q_smem)
    if ERASE:
        store_tile(R_desc, [0, 0, place, 0], r_smem)
    store_tile(K_desc, [0, 0, place, 0], k_smem)

    X = gl.where(rows[:, None] == cols[None, :], 1.0, 0.0)
    x_smem = seen_as(a_smem, dtype=gl.float16, shape=[N // C, C, C]).index(0)
    y_smem = seen_as(b_smem, dtype=gl.float16, shape=[N // C, C, C]).index(0)
    if ERASE:
        L = L * (k_factor * beta * -1.0)[:, None] * k_col[None, :]
        L = gl.where((rows[:, None] > cols[None, :]) & (gl.abs(L) < float("inf")), L, 0.0)
        T_smem.store(L.to(dtype))
        narrow = L.to(gl.float16)
        X = inverse_by_levels(narrow, inverse_of_blocks(narrow, rows, cols, C), rows, cols, x_smem, y_smem, 4, 6)
        if gl.max(gl.max(gl.where(gl.abs(X) < 256.0, 0, 1), 1), 0) > 0:  # float16 may not hold it: all in bfloat16
            below = T_smem.load(acc)
            X = gl.where(rows[:, None] == cols[None, :], 1.0, 0.0)
            X = X + gl.where(in_halves(rows, cols, 0), below.to(gl.float32), 0.0)
            X = inverse_by_levels(
                below, X, rows, cols, seen_as(x_smem, dtype=dtype), seen_as(y_smem, dtype=dtype), 1, 6
            )
    if X_desc is not None:
        put(X_desc, place, X, seen_as(x_smem, dtype=dtype))
    seen_as(marks_smem, vector, shape=[C]).store(beta)
    barrier()
    beta_col = seen_as(marks_smem, vector, shape=[C]).load(by_col)
    put(T_desc, place, X * beta_col[None, :], T_smem)
    tma.store_wait(0)
