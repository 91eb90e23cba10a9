"""`_selective_scan_bwd_kernel` for NVIDIA GPUs from Ampere on, with layouts of registers and shared memory by hand.

The algorithm is that of `_triton_backward_kernels`; shared memory is used as in `_gluon_kernels`. Rows are copied
asynchronously, two tiles ahead. All threads compute steps, inputs and gradients of a tile, and put them, with B and C,
into shared memory as float32. Then the states of a channel, in LANES lanes, go over the tile, GROUP tokens at a time.
Going forward, a group keeps its powers and decayed states in registers; going back, it uses them. So a state and token
costs two exponentials: one in the first pass over time, which stores the states at the borders of tiles, and one here.

Sums over the states of a channel (y, the gradients of step and input) are partial in LANES lanes. Sums over channels
(dB, dC) are partial in all other lanes. Both are written to shared memory, and read back by the threads that need the
sums. This costs one addition per value, and two accesses of 16 bytes per four values.
"""

from __future__ import annotations

from typing import Any  # noqa: F401 - in type comments

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from refold.ops.triton.gluon import append, barrier, copy, exp2, offset, seen_as, sigmoid, softplus


@gluon.jit
def _fetch(tiles, rows, at, live, STEP: gl.constexpr):
    """Start copying the tiles (buffers, stride, columns) from their ``rows`` on, as one group; return the next rows."""
    moved = ()  # type: Any
    for i in gl.static_range(len(tiles)):
        buffers, stride, columns = tiles[i]
        copy(buffers.index(at), rows[i], stride, columns, live)
        moved = append(moved, rows[i] + STEP * buffers.shape[1] * stride)
    async_copy.commit_group()
    return moved


@gluon.jit
def _column(tile, i, layout: gl.constexpr):
    """Return one token's numbers of the channels as a column."""
    return tile.index(i).load(gl.SliceLayout(1, layout))[:, None]


@gluon.jit
def _line(tile, i, layout: gl.constexpr):
    """Return one token's numbers of the states as a line."""
    return tile.index(i).load(gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def _rates(place, mask):
    """Load A, for powers of two; -inf must not make NaN of the tokens that fill a tile, whose step is zero."""
    A = gl.load(place, mask=mask, other=0.0).to(gl.float32)
    return gl.where(A < -1e38, -1e38, A) * 1.4426950408889634


@gluon.jit
def _starts(border, first, size, offs, mask, COUNT: gl.constexpr):
    """Load the states at the borders before COUNT groups."""
    found = ()  # type: Any
    for g in gl.static_range(COUNT):
        found = append(found, gl.load(border + (first + g) * size + offs, mask=mask, other=0.0))
    return found


@gluon.jit
def _over_states(parts, slot, i: gl.constexpr, products, LANES: gl.constexpr, layout: gl.constexpr):
    """Put the sums of (channels, states) over the states of a lane, (channels, lanes), into the parts of token i."""
    split = gl.reshape(products, [products.shape[0], LANES, products.shape[1] // LANES])
    sums = gl.convert_layout(gl.sum(split, axis=2), gl.SliceLayout(0, layout), assert_trivial=True)
    return gl.where(slot == i, sums[None, :, :], parts)


@gluon.jit
def _over_channels(parts, slot, i: gl.constexpr, products, layout: gl.constexpr):
    """Put the sums of (channels, states) over the channels of a lane into the parts of token i."""
    across: gl.constexpr = parts.shape[1]
    split = gl.reshape(products, [products.shape[0] // across, across, products.shape[1]])
    sums = gl.convert_layout(gl.sum(split, axis=0), gl.SliceLayout(0, layout), assert_trivial=True)
    return gl.where(slot == i, sums[None, :, :], parts)


@gluon.jit
def _by_lane(parts, LANES: gl.constexpr):
    """Lay (tokens, lanes of channels, states) out so that lanes of channels lie next to each other."""
    split = gl.reshape(parts, [parts.shape[0], parts.shape[1], LANES, parts.shape[2] // LANES])
    return gl.reshape(gl.permute(split, [0, 2, 1, 3]), [parts.shape[0], parts.shape[1] * parts.shape[2]])


@gluon.constexpr_function
def _sum_layouts(tokens, across, lanes, states, warps):
    """Return the layouts in which `_by_lane` is read and in which its sums over channels come out.

    A thread takes a token and a lane's states and every few lanes of channels; where warps are left, they repeat.
    """
    token = [1 << i for i in range(tokens.bit_length() - 1)]
    state = [1 << i for i in range(states.bit_length() - 1)]
    channel = [states << i for i in range(across.bit_length() - 1)]
    lane = [states * across << i for i in range(lanes.bit_length() - 1)]
    near = max(0, 5 - len(token))
    lane_bases = [[0, c] for c in channel[:near]] + [[t, 0] for t in token[: 5 - near]]
    warp_bases, left = [], warps.bit_length() - 1
    warp_bases = [[0, n] for n in lane[:left]] + [[0, 0]] * max(0, left - len(lane))
    reg_bases = [[0, s] for s in state] + [[0, c] for c in channel[near:]] + [[0, n] for n in lane[left:]]
    reg_bases += [[t, 0] for t in token[5 - near :]]

    def summed(bases):
        kept = []
        for t, n in bases:
            if n in channel:
                continue
            kept.append([t, n if n < states else n // across])
        return kept

    def blank(bases):
        return [[t, 0 if n in channel else (n if n < states else n // across)] for t, n in bases]

    read = gl.DistributedLinearLayout(reg_bases, lane_bases, warp_bases, [], [tokens, lanes * across * states])
    out = gl.DistributedLinearLayout(
        summed(reg_bases), blank(lane_bases), blank(warp_bases), [], [tokens, lanes * states]
    )
    return read, out


@gluon.jit
def _sum_channels(part, LANES: gl.constexpr, STATES: gl.constexpr, layouts: gl.constexpr):
    """Read what `_by_lane` laid out and sum over channels: (tokens, states)."""
    parts = part.load(layouts[0])
    across: gl.constexpr = parts.shape[1] // (LANES * STATES)
    split = gl.reshape(parts, [parts.shape[0], LANES, across, STATES])
    sums = gl.reshape(gl.sum(split, axis=2), [parts.shape[0], LANES * STATES])
    return gl.convert_layout(sums, layouts[1], assert_trivial=True)


@gluon.jit
def _selective_scan_bwd_segments_lanes_kernel(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, z_ptr, dt_bias_ptr, decay_ptr, dy_ptr, state_ptr, adjoint_ptr, factor_ptr,
    seqlen, segment, nsegments, channels, dstate, group_channels, group_blocks,
    stride_x_b, stride_x_t, stride_dt_b, stride_dt_t, stride_B_b, stride_B_t, stride_B_g,
    stride_C_b, stride_C_t, stride_C_g, stride_z_b, stride_z_t, stride_decay_b, stride_decay_t,
    BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, TOKENS: gl.constexpr, LANES: gl.constexpr, SOFTPLUS: gl.constexpr,
):  # fmt: skip
    """Grid (blocks of channels, segments, batch), as `_selective_scan_bwd_segments_kernel`."""
    WARPS: gl.constexpr = gl.num_warps()
    cn: gl.constexpr = gl.BlockedLayout([1, BLOCK_N // LANES], [32 // LANES, LANES], [WARPS, 1], [0, 1])
    c_lanes: gl.constexpr = min(32, BLOCK_D)
    n_lanes: gl.constexpr = min(32, BLOCK_N // 4)
    tc: gl.constexpr = gl.BlockedLayout([1, 1], [32 // c_lanes, c_lanes], [WARPS, 1], [1, 0])
    tn: gl.constexpr = gl.BlockedLayout([1, 4], [32 // n_lanes, n_lanes], [WARPS, 1], [1, 0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    group = gl.program_id(0) // group_blocks
    block = gl.program_id(0) % group_blocks
    pid_s = gl.program_id(1)
    row = gl.program_id(2).to(gl.int64)
    left = group_channels - block * BLOCK_D
    origin = group * group_channels + block * BLOCK_D
    begin = pid_s * segment
    end = gl.minimum(begin + segment, seqlen)
    first = begin.to(gl.int64)
    next_x = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [2, TOKENS, BLOCK_D], flat)
    next_dt = gl.allocate_shared_memory(dt_ptr.dtype.element_ty, [2, TOKENS, BLOCK_D], flat)
    next_dy = gl.allocate_shared_memory(dy_ptr.dtype.element_ty, [2, TOKENS, BLOCK_D], flat)
    next_B = gl.allocate_shared_memory(B_ptr.dtype.element_ty, [2, TOKENS, BLOCK_N], flat)
    next_C = gl.allocate_shared_memory(C_ptr.dtype.element_ty, [2, TOKENS, BLOCK_N], flat)
    tiles = ((next_x, stride_x_t, left), (next_dt, stride_dt_t, left), (next_B, stride_B_t, BLOCK_N),
             (next_C, stride_C_t, BLOCK_N), (next_dy, channels, left))  # fmt: skip
    rows = (
        x_ptr + row * stride_x_b + first * stride_x_t + origin,
        dt_ptr + row * stride_dt_b + first * stride_dt_t + origin,
        B_ptr + row * stride_B_b + first * stride_B_t + group * stride_B_g,
        C_ptr + row * stride_C_b + first * stride_C_t + group * stride_C_g,
        dy_ptr + (row * seqlen + first) * channels + origin,
    )
    if z_ptr is not None:
        next_z = gl.allocate_shared_memory(z_ptr.dtype.element_ty, [2, TOKENS, BLOCK_D], flat)
        tiles = append(tiles, (next_z, stride_z_t, left))
        rows = append(rows, z_ptr + row * stride_z_b + first * stride_z_t + origin)
    if decay_ptr is not None:
        next_decay = gl.allocate_shared_memory(decay_ptr.dtype.element_ty, [2, TOKENS, BLOCK_D], flat)
        tiles = append(tiles, (next_decay, stride_decay_t, left))
        rows = append(rows, decay_ptr + row * stride_decay_b + first * stride_decay_t + origin)
        tile_decay = gl.allocate_shared_memory(gl.float32, [TOKENS, BLOCK_D], flat)
        decays = seen_as(tile_decay, line)
    tile_step = gl.allocate_shared_memory(gl.float32, [TOKENS, BLOCK_D], flat)
    tile_input = gl.allocate_shared_memory(gl.float32, [TOKENS, BLOCK_D], flat)
    tile_dy = gl.allocate_shared_memory(gl.float32, [TOKENS, BLOCK_D], flat)
    tile_B = gl.allocate_shared_memory(gl.float32, [TOKENS, BLOCK_N], flat)
    tile_C = gl.allocate_shared_memory(gl.float32, [TOKENS, BLOCK_N], flat)
    steps = seen_as(tile_step, line)
    inputs = seen_as(tile_input, line)
    dys = seen_as(tile_dy, line)
    Bs = seen_as(tile_B, line)
    Cs = seen_as(tile_C, line)

    in_block = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(1, cn))
    offs_n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, cn))
    offs_state = (origin + in_block)[:, None] * dstate + offs_n[None, :]
    mask = (in_block < left)[:, None] & (offs_n >= 0)[None, :]
    A = _rates(A_ptr + offs_state, mask)
    offs_t = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, tc))
    offs_c = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, tc))
    live = offs_c < left
    bias = gl.zeros([BLOCK_D], gl.float32, layout=gl.SliceLayout(0, tc))
    if dt_bias_ptr is not None:
        bias = gl.load(dt_bias_ptr + origin + offs_c, mask=live, other=0.0).to(gl.float32)
    state = gl.zeros([BLOCK_D, BLOCK_N], gl.float32, layout=cn)
    adjoint = state * 0.0  # Triton 3.6 takes variables that begin as one value for one.
    factor = gl.full([BLOCK_D, BLOCK_N], 1.0, gl.float32, layout=cn)
    rows = _fetch(tiles, rows, 0, end - begin, 1)
    rows = _fetch(tiles, rows, 1, end - begin - TOKENS, 1)
    for t in range(begin, end, TOKENS):
        at = (t - begin) // TOKENS % 2
        async_copy.wait_group(1)
        x = next_x.index(at).load(tc).to(gl.float32)
        step = next_dt.index(at).load(tc).to(gl.float32) + bias[None, :]
        if SOFTPLUS:
            step = softplus(step)
        inside = (t + offs_t < end)[:, None] & live[None, :]
        step = gl.where(inside, step, 0.0)
        dy = next_dy.index(at).load(tc).to(gl.float32)
        if z_ptr is not None:
            z = next_z.index(at).load(tc).to(gl.float32)
            dy *= z * sigmoid(z)
        tile_step.store(step)
        tile_input.store(step * x)
        tile_dy.store(dy)
        tile_B.store(next_B.index(at).load(tn).to(gl.float32))
        tile_C.store(next_C.index(at).load(tn).to(gl.float32))
        if decay_ptr is not None:
            given = next_decay.index(at).load(tc).to(gl.float32)
            tile_decay.store(gl.where(inside, given, 1.0))
        rows = _fetch(tiles, rows, at, end - t - 2 * TOKENS, 1)
        for i in gl.static_range(TOKENS):
            own = exp2(_column(steps, i, cn) * A)
            if decay_ptr is not None:
                own *= _column(decays, i, cn)
            state = own * state + _column(inputs, i, cn) * _line(Bs, i, cn)
            factor *= own
            adjoint += factor * (_column(dys, i, cn) * _line(Cs, i, cn))
    async_copy.wait_group(0)
    place = (row * nsegments + pid_s) * channels * dstate + offs_state
    gl.store(state_ptr + place, state, mask=mask)
    gl.store(adjoint_ptr + place, adjoint, mask=mask)
    gl.store(factor_ptr + place, factor, mask=mask)


@gluon.jit
def _selective_scan_bwd_lanes_kernel(
    cu_seqlens_ptr, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, decay_ptr, initial_ptr, dy_ptr,
    dfinal_ptr, segment_state_ptr, segment_adjoint_ptr, segment_factor_ptr, border_ptr,
    dx_ptr, ddt_ptr, dz_ptr, ddecay_ptr, dinitial_ptr, dB_ptr, dC_ptr, dA_ptr, dD_ptr, dbias_ptr, row_size,
    batch, seqlen, nseqs, segment, nsegments, channels, dstate, group_channels, group_blocks,
    stride_x_b, stride_x_t, stride_dt_b, stride_dt_t, stride_B_b, stride_B_t, stride_B_g,
    stride_C_b, stride_C_t, stride_C_g, stride_z_b, stride_z_t, stride_decay_b, stride_decay_t,
    BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, TOKENS: gl.constexpr, GROUP: gl.constexpr, LANES: gl.constexpr,
    SOFTPLUS: gl.constexpr, FULL: gl.constexpr,
):  # fmt: skip
    """Grid (blocks of channels, segments, rows), as `_selective_scan_bwd_kernel`; TOKENS are those of a tile.

    Rows of x, dt, decay, z, B and C begin at multiples of 16 bytes; ``dstate`` is BLOCK_N. FULL: every tile is.
    """
    WARPS: gl.constexpr = gl.num_warps()
    GROUPS: gl.constexpr = TOKENS // GROUP
    STATES: gl.constexpr = BLOCK_N // LANES  # per lane
    ACROSS: gl.constexpr = 32 // LANES * WARPS  # lanes of different channels
    # (tokens, channels, states) of partial sums over channels, (tokens, channels, lanes) of those over states.
    kcn: gl.constexpr = gl.BlockedLayout([GROUP, 1, STATES], [1, 32 // LANES, LANES], [1, WARPS, 1], [1, 2, 0])
    kcl: gl.constexpr = gl.BlockedLayout([GROUP, 1, 1], [1, 32 // LANES, LANES], [1, WARPS, 1], [1, 2, 0])
    cn: gl.constexpr = gl.SliceLayout(0, kcn)
    layouts: gl.constexpr = _sum_layouts(GROUP, ACROSS, LANES, STATES, WARPS)
    kn: gl.constexpr = layouts[1]
    # Tiles: (tokens, channels), the same with partial sums of lanes, (tokens, states).
    c_lanes: gl.constexpr = min(32, BLOCK_D)
    n_lanes: gl.constexpr = min(32, BLOCK_N // 4)
    tc: gl.constexpr = gl.BlockedLayout([1, 1], [32 // c_lanes, c_lanes], [WARPS, 1], [1, 0])
    tcl: gl.constexpr = gl.BlockedLayout([1, LANES], [32 // c_lanes, c_lanes], [WARPS, 1], [1, 0])
    tn: gl.constexpr = gl.BlockedLayout([1, 4], [32 // n_lanes, n_lanes], [WARPS, 1], [1, 0])

    ngroups = gl.num_programs(0) // group_blocks
    group = gl.program_id(0) // group_blocks
    block = gl.program_id(0) % group_blocks
    pid_s = gl.program_id(1)
    left = group_channels - block * BLOCK_D  # channels from the first one on
    origin = group * group_channels + block * BLOCK_D

    # Two tiles on their way: the next one and the one after.
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    next_x = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [2, TOKENS, BLOCK_D], flat)
    next_dt = gl.allocate_shared_memory(dt_ptr.dtype.element_ty, [2, TOKENS, BLOCK_D], flat)
    next_dy = gl.allocate_shared_memory(dy_ptr.dtype.element_ty, [2, TOKENS, BLOCK_D], flat)
    next_B = gl.allocate_shared_memory(B_ptr.dtype.element_ty, [2, TOKENS, BLOCK_N], flat)
    next_C = gl.allocate_shared_memory(C_ptr.dtype.element_ty, [2, TOKENS, BLOCK_N], flat)
    forth = ((next_x, stride_x_t, left), (next_dt, stride_dt_t, left), (next_B, stride_B_t, BLOCK_N))
    if decay_ptr is not None:
        next_decay = gl.allocate_shared_memory(decay_ptr.dtype.element_ty, [2, TOKENS, BLOCK_D], flat)
        forth = append(forth, (next_decay, stride_decay_t, left))
    back = forth + ((next_C, stride_C_t, BLOCK_N), (next_dy, channels, left))  # noqa: RUF005
    if z_ptr is not None:
        next_z = gl.allocate_shared_memory(z_ptr.dtype.element_ty, [2, TOKENS, BLOCK_D], flat)
        back = append(back, (next_z, stride_z_t, left))
    # Stored by tile, read token by token.
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tile_step = gl.allocate_shared_memory(gl.float32, [TOKENS, BLOCK_D], flat)
    tile_input = gl.allocate_shared_memory(gl.float32, [TOKENS, BLOCK_D], flat)
    tile_dy = gl.allocate_shared_memory(gl.float32, [TOKENS, BLOCK_D], flat)
    tile_B = gl.allocate_shared_memory(gl.float32, [TOKENS, BLOCK_N], flat)
    tile_C = gl.allocate_shared_memory(gl.float32, [TOKENS, BLOCK_N], flat)
    steps = seen_as(tile_step, line)
    inputs = seen_as(tile_input, line)
    dys = seen_as(tile_dy, line)
    Bs = seen_as(tile_B, line)
    Cs = seen_as(tile_C, line)
    if decay_ptr is not None:
        tile_decay = gl.allocate_shared_memory(gl.float32, [TOKENS, BLOCK_D], flat)
        decays = seen_as(tile_decay, line)
    part_step = gl.allocate_shared_memory(gl.float32, [GROUP, BLOCK_D * LANES], flat)
    part_input = gl.allocate_shared_memory(gl.float32, [GROUP, BLOCK_D * LANES], flat)
    # Neighbouring tokens in other banks.
    skewed: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 2, [1, 0])
    part_B = gl.allocate_shared_memory(gl.float32, [GROUP, ACROSS * BLOCK_N], skewed)
    part_C = gl.allocate_shared_memory(gl.float32, [GROUP, ACROSS * BLOCK_N], skewed)
    if z_ptr is not None:
        part_y = gl.allocate_shared_memory(gl.float32, [GROUP, BLOCK_D * LANES], flat)
    if decay_ptr is not None:
        part_decay = gl.allocate_shared_memory(gl.float32, [GROUP, BLOCK_D * LANES], flat)

    in_block = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(1, cn))
    offs_n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, cn))
    offs_state = (origin + in_block)[:, None] * dstate + offs_n[None, :]
    mask = (in_block < left)[:, None] & (offs_n >= 0)[None, :]
    A = _rates(A_ptr + offs_state, mask)
    offs_t = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, tc))
    offs_g = gl.arange(0, GROUP, layout=gl.SliceLayout(1, tc))
    offs_c = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, tc))
    live = offs_c < left
    bias = gl.zeros([BLOCK_D], gl.float32, layout=gl.SliceLayout(0, tc))
    D = gl.zeros([BLOCK_D], gl.float32, layout=gl.SliceLayout(0, tc))
    if dt_bias_ptr is not None:
        bias = gl.load(dt_bias_ptr + origin + offs_c, mask=live, other=0.0).to(gl.float32)
    if D_ptr is not None:
        D = gl.load(D_ptr + origin + offs_c, mask=live, other=0.0).to(gl.float32)
    offs_out = offs_g[:, None] * channels + offs_c[None, :]
    offs_kt = gl.arange(0, GROUP, layout=gl.SliceLayout(1, kn))
    offs_kn = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, kn))
    slot_n = gl.arange(0, GROUP, layout=gl.SliceLayout(1, gl.SliceLayout(2, kcn)))[:, None, None]
    slot_l = gl.arange(0, GROUP, layout=gl.SliceLayout(1, gl.SliceLayout(2, kcl)))[:, None, None]
    none_n = gl.zeros([GROUP, ACROSS, BLOCK_N], gl.float32, layout=kcn)
    none_l = gl.zeros([GROUP, BLOCK_D, LANES], gl.float32, layout=kcl)

    dA = gl.zeros([BLOCK_D, BLOCK_N], gl.float32, layout=cn)
    dD = gl.zeros([GROUP, BLOCK_D], gl.float32, layout=tc)
    dbias = gl.zeros([GROUP, BLOCK_D], gl.float32, layout=tc)
    size = channels.to(gl.int64) * dstate
    for turn in range(gl.program_id(2), nseqs, gl.num_programs(2)):
        sequence = gl.program_id(2).to(gl.int64) * 0 + turn
        if cu_seqlens_ptr is None:
            row = sequence
            begin = pid_s * segment
            end = gl.minimum(begin + segment, seqlen)
            borders = (sequence * gl.cdiv(seqlen, TOKENS) + begin // TOKENS) * GROUPS
        else:
            row = sequence * 0
            begin = offset(cu_seqlens_ptr, sequence, seqlen)
            end = offset(cu_seqlens_ptr, sequence + 1, seqlen)
            borders = (sequence + begin // TOKENS) * GROUPS
        count = gl.cdiv(gl.maximum(end - begin, 0), TOKENS)
        segments = sequence * nsegments * size
        border = border_ptr + borders * size

        # Forth, leaving the state at the border of each tile.
        state = gl.zeros([BLOCK_D, BLOCK_N], gl.float32, layout=cn)
        if initial_ptr is not None:
            state = gl.load(initial_ptr + sequence * size + offs_state, mask=mask, other=0.0).to(gl.float32)
        for s in range(pid_s):
            at = segments + s * size
            factor = gl.load(segment_factor_ptr + at + offs_state, mask=mask, other=0.0)
            state = state * factor + gl.load(segment_state_ptr + at + offs_state, mask=mask, other=0.0)
        first = begin.to(gl.int64)
        rows = (
            x_ptr + row * stride_x_b + first * stride_x_t + origin,
            dt_ptr + row * stride_dt_b + first * stride_dt_t + origin,
            B_ptr + row * stride_B_b + first * stride_B_t + group * stride_B_g,
        )
        if decay_ptr is not None:
            rows = append(rows, decay_ptr + row * stride_decay_b + first * stride_decay_t + origin)
        rows = _fetch(forth, rows, 0, end - begin, 1)
        rows = _fetch(forth, rows, 1, end - begin - TOKENS, 1)
        for j in range(count):
            at = j % 2
            t = begin + j * TOKENS
            async_copy.wait_group(1)
            x = next_x.index(at).load(tc).to(gl.float32)
            step = next_dt.index(at).load(tc).to(gl.float32) + bias[None, :]
            if SOFTPLUS:
                step = softplus(step)
            inside = (t + offs_t < end)[:, None] & live[None, :]
            step = gl.where(inside, step, 0.0)
            tile_step.store(step)
            tile_input.store(step * x)
            tile_B.store(next_B.index(at).load(tn).to(gl.float32))
            if decay_ptr is not None:
                given = next_decay.index(at).load(tc).to(gl.float32)
                tile_decay.store(gl.where(inside, given, 1.0))
            rows = _fetch(forth, rows, at, end - t - 2 * TOKENS, 1)
            for g in gl.static_range(GROUPS):
                gl.store(border + (j * GROUPS + g) * size + offs_state, state, mask=mask)
                for i in gl.static_range(GROUP):
                    factor = exp2(_column(steps, g * GROUP + i, cn) * A)
                    if decay_ptr is not None:
                        factor *= _column(decays, g * GROUP + i, cn)
                    u = _column(inputs, g * GROUP + i, cn)
                    state = factor * state + u * _line(Bs, g * GROUP + i, cn)
        async_copy.wait_group(0)

        # And back.
        carried = gl.zeros([BLOCK_D, BLOCK_N], gl.float32, layout=cn)  # f[t+1] λ[t+1], or the final state's gradient
        if dfinal_ptr is not None:
            carried = gl.load(dfinal_ptr + sequence * size + offs_state, mask=mask, other=0.0).to(gl.float32)
        for s in range(nsegments - 1 - pid_s):
            at = segments + (nsegments - 1 - s) * size
            factor = gl.load(segment_factor_ptr + at + offs_state, mask=mask, other=0.0)
            carried = carried * factor + gl.load(segment_adjoint_ptr + at + offs_state, mask=mask, other=0.0)
        last = begin + (count - 1) * TOKENS
        first = last.to(gl.int64)
        rows = (
            x_ptr + row * stride_x_b + first * stride_x_t + origin,
            dt_ptr + row * stride_dt_b + first * stride_dt_t + origin,
            B_ptr + row * stride_B_b + first * stride_B_t + group * stride_B_g,
        )
        if decay_ptr is not None:
            rows = append(rows, decay_ptr + row * stride_decay_b + first * stride_decay_t + origin)
        rows = append(rows, C_ptr + row * stride_C_b + first * stride_C_t + group * stride_C_g)
        rows = append(rows, dy_ptr + (row * seqlen + first) * channels + origin)
        if z_ptr is not None:
            rows = append(rows, z_ptr + row * stride_z_b + first * stride_z_t + origin)
        rows = _fetch(back, rows, 0, gl.minimum(end - last, count * TOKENS), -1)
        rows = _fetch(back, rows, 1, (count - 1) * TOKENS, -1)
        next_starts = _starts(border, (count - 1) * GROUPS, size, offs_state, mask & (count > 0), GROUPS)
        for turned in range(count):
            at = turned % 2
            j = count - 1 - turned
            t = begin + j * TOKENS
            starts = next_starts
            next_starts = _starts(border, (j - 1) * GROUPS, size, offs_state, mask & (j > 0), GROUPS)
            async_copy.wait_group(1)
            x = next_x.index(at).load(tc).to(gl.float32)
            step = next_dt.index(at).load(tc).to(gl.float32) + bias[None, :]
            if SOFTPLUS:
                step = softplus(step)
            inside = (t + offs_t < end)[:, None] & live[None, :]
            step = gl.where(inside, step, 0.0)
            dy = next_dy.index(at).load(tc).to(gl.float32)
            if z_ptr is not None:
                z = next_z.index(at).load(tc).to(gl.float32)
                dy *= z * sigmoid(z)
            tile_step.store(step)
            tile_input.store(step * x)
            tile_dy.store(dy)
            tile_B.store(next_B.index(at).load(tn).to(gl.float32))
            tile_C.store(next_C.index(at).load(tn).to(gl.float32))
            if decay_ptr is not None:
                given = next_decay.index(at).load(tc).to(gl.float32)
                tile_decay.store(gl.where(inside, given, 1.0))
            for g in gl.static_range(GROUPS - 1, -1, -1):
                state = starts[g]
                powers = ()  # type: Any
                reached = ()  # type: Any
                ys, dCs = none_l, none_n
                for i in gl.static_range(GROUP):
                    token = g * GROUP + i
                    power = exp2(_column(steps, token, cn) * A)
                    before = power * state
                    powers = append(powers, power)
                    reached = append(reached, before)
                    if decay_ptr is not None:
                        before *= _column(decays, token, cn)
                    state = before + _column(inputs, token, cn) * _line(Bs, token, cn)
                    if z_ptr is not None:
                        ys = _over_states(ys, slot_l, i, state * _line(Cs, token, cn), LANES, kcl)
                    dCs = _over_channels(dCs, slot_n, i, state * _column(dys, token, cn), kcn)
                if z_ptr is not None:
                    part_y.store(gl.reshape(ys, [GROUP, BLOCK_D * LANES]))
                part_C.store(_by_lane(dCs, LANES))
                barrier()  # Else the compiler keeps what was read above in registers that it lacks.
                dsteps, dinputs, ddecays, dBs = none_l, none_l, none_l, none_n
                for i in gl.static_range(GROUP - 1, -1, -1):
                    token = g * GROUP + i
                    adjoint = _column(dys, token, cn) * _line(Cs, token, cn) + carried
                    # With the power before the decay: a decay of zero has a gradient, too.
                    dlog = reached[i] * adjoint
                    if not FULL:
                        # A state that is not finite must not reach A through the zero steps after the end.
                        dlog = gl.where(t + token < end, dlog, 0.0)
                    carried = powers[i] * adjoint
                    if decay_ptr is not None:
                        ddecays = _over_states(ddecays, slot_l, i, dlog, LANES, kcl)
                        decay_i = _column(decays, token, cn)
                        dlog *= decay_i
                        carried *= decay_i
                    dA += _column(steps, token, cn) * dlog
                    dsteps = _over_states(dsteps, slot_l, i, dlog * A, LANES, kcl)
                    dinputs = _over_states(dinputs, slot_l, i, adjoint * _line(Bs, token, cn), LANES, kcl)
                    dBs = _over_channels(dBs, slot_n, i, adjoint * _column(inputs, token, cn), kcn)
                part_step.store(gl.reshape(dsteps, [GROUP, BLOCK_D * LANES]))
                part_input.store(gl.reshape(dinputs, [GROUP, BLOCK_D * LANES]))
                if decay_ptr is not None:
                    part_decay.store(gl.reshape(ddecays, [GROUP, BLOCK_D * LANES]))
                part_B.store(_by_lane(dBs, LANES))

                # The sums, and what follows from them token by token.
                here = t + g * GROUP
                token_row = row * seqlen + here
                x = next_x.index(at).slice(g * GROUP, GROUP).load(tc).to(gl.float32)
                raw = next_dt.index(at).slice(g * GROUP, GROUP).load(tc).to(gl.float32) + bias[None, :]
                dy = next_dy.index(at).slice(g * GROUP, GROUP).load(tc).to(gl.float32)
                step = raw
                if SOFTPLUS:
                    step = softplus(raw)
                inside = (here + offs_g < end)[:, None] & live[None, :]
                out = token_row * channels + origin
                if z_ptr is not None:
                    z = next_z.index(at).slice(g * GROUP, GROUP).load(tc).to(gl.float32)
                    gate = sigmoid(z)
                    y = gl.sum(gl.reshape(part_y.load(tcl), [GROUP, BLOCK_D, LANES]), axis=2)
                    y = gl.convert_layout(y, tc, assert_trivial=True)
                    if D_ptr is not None:
                        y += D[None, :] * x
                    dz = dy * y * (gate + z * gate * (1.0 - gate))
                    gl.store(dz_ptr + out + offs_out, dz.to(dz_ptr.dtype.element_ty), mask=inside)
                    dy *= z * gate
                dinput = gl.sum(gl.reshape(part_input.load(tcl), [GROUP, BLOCK_D, LANES]), axis=2)
                dinput = gl.convert_layout(dinput, tc, assert_trivial=True)
                draw = gl.sum(gl.reshape(part_step.load(tcl), [GROUP, BLOCK_D, LANES]), axis=2)
                draw = gl.convert_layout(draw, tc, assert_trivial=True) * 0.6931471805599453 + dinput * x
                if SOFTPLUS:
                    draw *= gl.where(raw > 20.0, 1.0, sigmoid(raw))
                draw = gl.where(inside, draw, 0.0)
                dx = dinput * step
                if D_ptr is not None:
                    dx += D[None, :] * dy
                    dD += gl.where(inside, dy * x, 0.0)
                dbias += draw
                gl.store(ddt_ptr + out + offs_out, draw.to(ddt_ptr.dtype.element_ty), mask=inside)
                gl.store(dx_ptr + out + offs_out, dx.to(dx_ptr.dtype.element_ty), mask=inside)
                if decay_ptr is not None:
                    ddecay = gl.sum(gl.reshape(part_decay.load(tcl), [GROUP, BLOCK_D, LANES]), axis=2)
                    ddecay = gl.convert_layout(ddecay, tc, assert_trivial=True)
                    gl.store(ddecay_ptr + out + offs_out, ddecay.to(ddecay_ptr.dtype.element_ty), mask=inside)
                cells = (((block.to(gl.int64) * batch * seqlen + token_row) * ngroups) + group) * dstate
                offs_cell = (offs_kt * (ngroups * dstate))[:, None] + offs_kn[None, :]
                inside_n = (here + offs_kt < end)[:, None] & (offs_kn >= 0)[None, :]
                gl.store(dB_ptr + cells + offs_cell, _sum_channels(part_B, LANES, STATES, layouts), mask=inside_n)
                gl.store(dC_ptr + cells + offs_cell, _sum_channels(part_C, LANES, STATES, layouts), mask=inside_n)
            rows = _fetch(back, rows, at, (j - 1) * TOKENS, -1)
        async_copy.wait_group(0)
        if dinitial_ptr is not None:
            place = dinitial_ptr + sequence * size + offs_state
            gl.store(place, carried.to(dinitial_ptr.dtype.element_ty), mask=mask & (pid_s == 0))

    own = (gl.program_id(2).to(gl.int64) * nsegments + pid_s) * row_size
    gl.store(dA_ptr + own + offs_state, dA, mask=mask)
    if D_ptr is not None:
        gl.store(dD_ptr + own + origin + offs_c, gl.sum(dD, axis=0), mask=live)
    if dt_bias_ptr is not None:
        gl.store(dbias_ptr + own + origin + offs_c, gl.sum(dbias, axis=0), mask=live)
