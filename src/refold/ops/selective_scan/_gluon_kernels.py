"""`_selective_scan_fwd_kernel` for NVIDIA GPUs from Ampere on, with layouts of registers and shared memory by hand.

A program goes over time, one tile of tokens after the other. All its threads compute the steps of the tile, and put
them, with x * step, B and C, into shared memory as float32. Then the states go over the tile. The states of a channel
are in LANES lanes, and take GROUP tokens at a time. So a state and token cost one exponential, four products and sums,
and part of a 16-byte read. The parts of y go back through shared memory to the threads that hold x and z.

With fewer states per lane, more warps share a channel. So few channels fill the device without cutting time; cutting
time costs every exponential twice. With more states per lane, there are fewer reads of B and C per state.

Meanwhile, the rows of the next two tiles are copied asynchronously. Loads into registers would be simpler. But a warp
has only six scoreboards for all slow instructions: waiting for an exponential would then mean waiting for memory, too.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from refold.ops.triton.gluon import append, copy, exp2, offset, seen_as, silu, softplus


@gluon.jit
def _advance(decay, state, next_decay, next_state):
    """Compose two steps of the recurrence; in an unused decay nothing is computed."""
    return decay * next_decay, state * next_decay + next_state


@gluon.jit
def _last(walked, token, layout: gl.constexpr):
    """Return the last token's row: a sum of integers, since the compiler leaves out adding their zeros."""
    alone = gl.where(token == walked.shape[0] - 1, walked.to(gl.int32, bitcast=True), 0)
    return gl.convert_layout(gl.sum(alone, axis=0).to(gl.float32, bitcast=True), layout, assert_trivial=True)


@gluon.jit
def _fetch(tiles, rows, at, live):
    """Start copying the tiles (buffers, stride, columns) from their ``rows`` on, as one group; return the next rows.

    Moved along, not formed from the token: that is 5 % of the time with 16-bit inputs.
    """
    moved = ()
    for i in gl.static_range(len(tiles)):
        buffers, stride, columns = tiles[i]
        copy(buffers.index(at), rows[i], stride, columns, live)
        moved = append(moved, rows[i] + buffers.shape[1] * stride)
    async_copy.commit_group()
    return moved


@gluon.jit
def _selective_scan_fwd_lanes_kernel(
    cu_seqlens_ptr, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, initial_ptr,
    segment_state_ptr, segment_step_ptr, y_ptr, final_ptr, decay_ptr,
    seqlen, segment, nsegments, channels, dstate, group_channels,
    stride_x_b, stride_x_t, stride_dt_b, stride_dt_t, stride_B_b, stride_B_t, stride_B_g,
    stride_C_b, stride_C_t, stride_C_g, stride_z_b, stride_z_t, stride_decay_b, stride_decay_t,
    BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_T: gl.constexpr, GROUP: gl.constexpr, LANES: gl.constexpr,
    SOFTPLUS: gl.constexpr, LOCAL: gl.constexpr,
):  # fmt: skip
    """Grid (blocks of channels, segments, sequences): a program owns BLOCK_D channels of one segment.

    LOCAL writes the segment's own state and summed step, or with decays its factor, a product per state; else y, from
    the state after the segments before it, and the final state. Reads its inputs once. Float32. Rows of x,
    dt, decay, z, B and C begin at multiples of 16 bytes; ``dstate`` is BLOCK_N; tokens and channels may be ragged.
    """
    GROUPS: gl.constexpr = BLOCK_T // GROUP
    WARPS: gl.constexpr = gl.num_warps()
    OWN: gl.constexpr = BLOCK_D * LANES // (32 * WARPS)  # channels per lane
    # (tokens of a group, channels, states); (groups, tokens of a group, channels, lanes) of y, not yet summed.
    kcn: gl.constexpr = gl.BlockedLayout(
        [GROUP, OWN, BLOCK_N // LANES], [1, 32 // LANES, LANES], [1, WARPS, 1], [1, 2, 0]
    )
    gkcl: gl.constexpr = gl.BlockedLayout(
        [GROUPS, GROUP, OWN, 1], [1, 1, 32 // LANES, LANES], [1, 1, WARPS, 1], [2, 3, 1, 0]
    )
    cn: gl.constexpr = gl.SliceLayout(0, kcn)
    # Tiles: (tokens, channels), the same with the lanes of y, (tokens, states).
    c_lanes: gl.constexpr = min(32, BLOCK_D // 2)
    n_lanes: gl.constexpr = min(32, BLOCK_N // 4)
    tc: gl.constexpr = gl.BlockedLayout([1, 2], [32 // c_lanes, c_lanes], [WARPS, 1], [1, 0])
    tcl: gl.constexpr = gl.BlockedLayout([1, 2 * LANES], [32 // c_lanes, c_lanes], [WARPS, 1], [1, 0])
    tn: gl.constexpr = gl.BlockedLayout([1, 4], [32 // n_lanes, n_lanes], [WARPS, 1], [1, 0])

    pid_s = gl.program_id(1)
    pid_k = gl.program_id(2).to(gl.int64)
    block = gl.program_id(0) * BLOCK_D
    group = block // group_channels
    if cu_seqlens_ptr is None:
        pid_b = pid_k
        begin = pid_s * segment
        end = gl.minimum(begin + segment, seqlen)
    else:
        pid_b = pid_k * 0
        begin = offset(cu_seqlens_ptr, pid_k, seqlen)
        end = offset(cu_seqlens_ptr, pid_k + 1, seqlen)

    # Two tiles on their way: the next one and the one after.
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    next_x = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [2, BLOCK_T, BLOCK_D], flat)
    next_dt = gl.allocate_shared_memory(dt_ptr.dtype.element_ty, [2, BLOCK_T, BLOCK_D], flat)
    next_B = gl.allocate_shared_memory(B_ptr.dtype.element_ty, [2, BLOCK_T, BLOCK_N], flat)
    first = begin.to(gl.int64)
    left = channels - block
    tiles = ((next_x, stride_x_t, left), (next_dt, stride_dt_t, left), (next_B, stride_B_t, BLOCK_N))
    rows = (
        x_ptr + pid_b * stride_x_b + first * stride_x_t + block,
        dt_ptr + pid_b * stride_dt_b + first * stride_dt_t + block,
        B_ptr + pid_b * stride_B_b + first * stride_B_t + group * stride_B_g,
    )
    if not LOCAL:
        next_C = gl.allocate_shared_memory(C_ptr.dtype.element_ty, [2, BLOCK_T, BLOCK_N], flat)
        tiles = append(tiles, (next_C, stride_C_t, BLOCK_N))
        rows = append(rows, C_ptr + pid_b * stride_C_b + first * stride_C_t + group * stride_C_g)
        if z_ptr is not None:
            next_z = gl.allocate_shared_memory(z_ptr.dtype.element_ty, [2, BLOCK_T, BLOCK_D], flat)
            tiles = append(tiles, (next_z, stride_z_t, left))
            rows = append(rows, z_ptr + pid_b * stride_z_b + first * stride_z_t + block)
    if decay_ptr is not None:
        next_decay = gl.allocate_shared_memory(decay_ptr.dtype.element_ty, [2, BLOCK_T, BLOCK_D], flat)
        tiles = append(tiles, (next_decay, stride_decay_t, left))
        rows = append(rows, decay_ptr + pid_b * stride_decay_b + first * stride_decay_t + block)
    rows = _fetch(tiles, rows, 0, end - begin)
    rows = _fetch(tiles, rows, 1, end - begin - BLOCK_T)

    offs_d = block + gl.arange(0, BLOCK_D, layout=gl.SliceLayout(1, cn))
    offs_n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, cn))
    offs_state = offs_d[:, None] * dstate + offs_n[None, :]
    mask = (offs_d < channels)[:, None] & (offs_n >= 0)[None, :]
    A = gl.load(A_ptr + offs_state, mask=mask, other=0.0).to(gl.float32)
    A = gl.where(A < -1e38, -1e38, A) * 1.4426950408889634  # -inf times the zero step of padding is NaN
    state = gl.zeros([BLOCK_D, BLOCK_N], gl.float32, layout=cn)
    row = pid_k * nsegments * channels
    if not LOCAL:
        if initial_ptr is not None:
            initial = initial_ptr + pid_k * channels * dstate
            state = gl.load(initial + offs_state, mask=mask, other=0.0).to(gl.float32)
        for earlier in range(pid_s):
            before = row + earlier * channels
            if decay_ptr is None:
                summed = gl.load(segment_step_ptr + before + offs_d, mask=offs_d < channels, other=0.0)
                factor = exp2(summed[:, None] * A)
            else:
                factor = gl.load(segment_step_ptr + before * dstate + offs_state, mask=mask, other=0.0)
            own = gl.load(segment_state_ptr + before * dstate + offs_state, mask=mask, other=0.0)
            state = state * factor + own
    offs_t = gl.arange(0, BLOCK_T, layout=gl.SliceLayout(1, tc))
    offs_c = block + gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, tc))
    live = offs_c < channels
    if dt_bias_ptr is not None:
        bias = gl.load(dt_bias_ptr + offs_c, mask=live, other=0.0).to(gl.float32)
    if D_ptr is not None:
        D = gl.load(D_ptr + offs_c, mask=live, other=0.0).to(gl.float32)
    y_row = y_ptr + (pid_b * seqlen + begin) * channels
    offs_y = offs_t[:, None] * channels + offs_c[None, :]

    # Stored by tile and read by group: tokens lie next to each other in the steps, states in B and C.
    by_channel: gl.constexpr = [GROUPS, GROUP, BLOCK_D]
    by_state: gl.constexpr = [GROUPS, GROUP, BLOCK_N]
    tile_of_channels: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 2, 0])
    tile_of_states: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    group_of_channels: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0, 1])
    tile_step = gl.allocate_shared_memory(gl.float32, by_channel, tile_of_channels)
    tile_input = gl.allocate_shared_memory(gl.float32, by_channel, tile_of_channels)
    tile_B = gl.allocate_shared_memory(gl.float32, by_state, tile_of_states)
    group_step = seen_as(tile_step, group_of_channels)
    group_input = seen_as(tile_input, group_of_channels)
    group_B = seen_as(tile_B, flat)
    if decay_ptr is not None:
        tile_decay = gl.allocate_shared_memory(gl.float32, by_channel, tile_of_channels)
        group_decay = seen_as(tile_decay, group_of_channels)
    if LOCAL:
        if decay_ptr is None:
            total = gl.zeros([BLOCK_T, BLOCK_D], gl.float32, layout=tc)
        else:
            total = gl.full([BLOCK_D, BLOCK_N], 1.0, gl.float32, layout=cn)
    else:
        tile_C = gl.allocate_shared_memory(gl.float32, by_state, tile_of_states)
        group_C = seen_as(tile_C, flat)
        swizzled: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
        tile_y = gl.allocate_shared_memory(gl.float32, [BLOCK_T, BLOCK_D * LANES], swizzled)
        parts = gl.zeros([GROUPS, GROUP, BLOCK_D, LANES], gl.float32, layout=gkcl)
        slot = gl.arange(0, GROUPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, gkcl))))
        slot = slot[:, None, None, None]
    token = gl.arange(0, GROUP, layout=gl.SliceLayout(1, gl.SliceLayout(2, kcn)))[:, None, None]

    for t in range(begin, end, BLOCK_T):
        at = (t - begin) // BLOCK_T % 2
        async_copy.wait_group(1)
        x = next_x.index(at).load(tc).to(gl.float32)
        step = next_dt.index(at).load(tc).to(gl.float32)
        if dt_bias_ptr is not None:
            step += bias[None, :]
        if SOFTPLUS:
            step = softplus(step)
        inside = (t + offs_t < end)[:, None] & live[None, :]
        step = gl.where(inside, step, 0.0)
        tile_step.store(gl.reshape(step, by_channel))
        tile_input.store(gl.reshape(step * x, by_channel))
        tile_B.store(gl.reshape(next_B.index(at).load(tn).to(gl.float32), by_state))
        if decay_ptr is not None:
            given = next_decay.index(at).load(tc).to(gl.float32)
            tile_decay.store(gl.reshape(gl.where(inside, given, 1.0), by_channel))
        if LOCAL:
            if decay_ptr is None:
                total += step
        else:
            tile_C.store(gl.reshape(next_C.index(at).load(tn).to(gl.float32), by_state))
            if z_ptr is not None:
                z = next_z.index(at).load(tc)
        rows = _fetch(tiles, rows, at, end - t - 2 * BLOCK_T)
        for g in gl.static_range(GROUPS):
            s = group_step.index(g).load(gl.SliceLayout(2, kcn))
            u = group_input.index(g).load(gl.SliceLayout(2, kcn))
            B = group_B.index(g).load(gl.SliceLayout(1, kcn))
            decay = exp2(s[:, :, None] * A[None, :, :])
            if decay_ptr is not None:
                decay *= group_decay.index(g).load(gl.SliceLayout(2, kcn))[:, :, None]
            fed = u[:, :, None] * B[:, None, :]
            fed = gl.where(token == 0, decay * state[None, :, :] + fed, fed)
            factors, walked = gl.associative_scan((decay, fed), 0, _advance)
            state = _last(walked, token, cn)
            if LOCAL:
                if decay_ptr is not None:
                    total *= _last(factors, token, cn)
            else:
                C = group_C.index(g).load(gl.SliceLayout(1, kcn))
                products = gl.reshape(walked * C[:, None, :], [GROUP, BLOCK_D, LANES, BLOCK_N // LANES])
                part = gl.convert_layout(gl.sum(products, axis=3), gl.SliceLayout(0, gkcl), assert_trivial=True)
                parts = gl.where(slot == g, part[None, :, :, :], parts)
        if not LOCAL:
            tile_y.store(gl.reshape(parts, [BLOCK_T, BLOCK_D * LANES]))
            y = gl.sum(gl.reshape(tile_y.load(tcl), [BLOCK_T, BLOCK_D, LANES]), axis=2)
            y = gl.convert_layout(y, tc, assert_trivial=True)
            if D_ptr is not None:
                y += D[None, :] * x
            if z_ptr is not None:
                y *= silu(z.to(gl.float32))
            gl.store(y_row + offs_y, y.to(y_ptr.dtype.element_ty), mask=inside)
            y_row += BLOCK_T * channels
    if LOCAL:
        gl.store(segment_state_ptr + (row + pid_s * channels) * dstate + offs_state, state, mask=mask)
        if decay_ptr is None:
            gl.store(segment_step_ptr + row + pid_s * channels + offs_c, gl.sum(total, axis=0), mask=live)
        else:
            gl.store(segment_step_ptr + (row + pid_s * channels) * dstate + offs_state, total, mask=mask)
    elif pid_s == nsegments - 1:
        final = final_ptr + pid_k * channels * dstate
        gl.store(final + offs_state, state.to(final_ptr.dtype.element_ty), mask=mask)
