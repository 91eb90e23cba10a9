"""`_selective_scan_bwd_kernel` for NVIDIA GPUs from Ampere on, with layouts and shared memory laid out by hand.

The algorithm is that of `_triton_backward_kernels`, the way through shared memory that of `_gluon_kernels`: rows are
copied asynchronously two tiles ahead; all threads form steps, inputs and gradients of a tile and put them, with B and
C, into shared memory as float32; then the states of a channel, in LANES lanes, walk through it GROUP tokens at a time.
A group keeps its powers and decayed states in registers on its way forward and uses them on its way back, so that a
state and token costs two exponentials in all: one in the first walk over time, which leaves the states at the borders
of tiles, one here.

What is summed over the states of a channel (y, the gradients of step and input) is partial in LANES lanes; what is
summed over channels (dB, dC) is partial in all others. Both are written to shared memory and read back by the threads
that need the sums, at the price of one addition a value and two accesses of 16 bytes for four.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from refold.ops.selective_scan._gluon_kernels import _append, _copy, _exp2, _offset, _seen_as, _softplus


@gluon.jit
def _reciprocal(v):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [v], gl.float32, True, 1)


@gluon.jit
def _sigmoid(v):
    return _reciprocal(1.0 + _exp2(v * -1.4426950408889634))


@gluon.jit
def _fetch(tiles, rows, at, live, STEP: gl.constexpr):
    """Start copying the tiles (buffers, stride, columns) from their ``rows`` on, as one group; return the next rows."""
    moved = ()  # type: Any
    for i in gl.static_range(len(tiles)):
        buffers, stride, columns = tiles[i]
        _copy(buffers.index(at), rows[i], stride, columns, live)
        moved = _append(moved, rows[i] + STEP * buffers.shape[1] * stride)
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
def _over_states(products, LANES: gl.constexpr, layout: gl.constexpr):
    """Sum (channels, states) over the states of a lane: (channels, lanes)."""
    split = gl.reshape(products, [products.shape[0], LANES, products.shape[1] // LANES])
    return gl.convert_layout(gl.sum(split, axis=2), layout, assert_trivial=True)


@gluon.jit
def _over_channels(products, OWN: gl.constexpr, layout: gl.constexpr):
    """Sum (channels, states) over the channels of a lane: (lanes of channels, states)."""
    split = gl.reshape(products, [OWN, products.shape[0] // OWN, products.shape[1]])
    return gl.convert_layout(gl.sum(split, axis=0), layout, assert_trivial=True)


@gluon.jit
def _selective_scan_bwd_lanes_kernel(
    cu_seqlens_ptr, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, decay_ptr, initial_ptr, dy_ptr,
    dfinal_ptr, segment_state_ptr, segment_adjoint_ptr, segment_factor_ptr, border_ptr,
    dx_ptr, ddt_ptr, dz_ptr, ddecay_ptr, dinitial_ptr, dB_ptr, dC_ptr, dA_ptr, dD_ptr, dbias_ptr, row_size,
    batch, seqlen, nseqs, segment, nsegments, channels, dstate, group_channels, group_blocks,
    stride_x_b, stride_x_t, stride_dt_b, stride_dt_t, stride_B_b, stride_B_t, stride_B_g,
    stride_C_b, stride_C_t, stride_C_g, stride_z_b, stride_z_t, stride_decay_b, stride_decay_t,
    BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, TOKENS: gl.constexpr, GROUP: gl.constexpr, LANES: gl.constexpr,
    SOFTPLUS: gl.constexpr,
):  # fmt: skip
    """Grid (blocks of channels, segments, rows), as `_selective_scan_bwd_kernel`; TOKENS are those of a tile.

    Rows of x, dt, decay, z, B and C begin at multiples of 16 bytes; ``dstate`` is BLOCK_N.
    """
    WARPS: gl.constexpr = gl.num_warps()
    GROUPS: gl.constexpr = TOKENS // GROUP
    STATES: gl.constexpr = BLOCK_N // LANES  # a lane
    ACROSS: gl.constexpr = 32 // LANES * WARPS  # lanes of different channels
    OWN: gl.constexpr = BLOCK_D // ACROSS  # channels a lane
    # (tokens, channels, states); (tokens, channels, lanes) and (tokens, lanes of channels, states) of partial sums.
    kcn: gl.constexpr = gl.BlockedLayout([GROUP, 1, STATES], [1, 32 // LANES, LANES], [1, WARPS, 1], [2, 1, 0])
    kcl: gl.constexpr = gl.BlockedLayout([GROUP, 1, 1], [1, 32 // LANES, LANES], [1, WARPS, 1], [2, 1, 0])
    cn: gl.constexpr = gl.SliceLayout(0, kcn)
    # Tiles: (tokens, channels), the same with partial sums of lanes, (tokens, states), and those with lanes.
    c_lanes: gl.constexpr = min(32, BLOCK_D // 2)
    n_lanes: gl.constexpr = min(32, BLOCK_N // 4)
    tc: gl.constexpr = gl.BlockedLayout([1, 2], [32 // c_lanes, c_lanes], [WARPS, 1], [1, 0])
    tcl: gl.constexpr = gl.BlockedLayout([1, 2 * LANES], [32 // c_lanes, c_lanes], [WARPS, 1], [1, 0])
    tn: gl.constexpr = gl.BlockedLayout([1, 4], [32 // n_lanes, n_lanes], [WARPS, 1], [1, 0])
    tan: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [WARPS, 1], [1, 0])

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
        forth = _append(forth, (next_decay, stride_decay_t, left))
    back = _append(_append(forth, (next_C, stride_C_t, BLOCK_N)), (next_dy, channels, left))
    if z_ptr is not None:
        next_z = gl.allocate_shared_memory(z_ptr.dtype.element_ty, [2, TOKENS, BLOCK_D], flat)
        back = _append(back, (next_z, stride_z_t, left))
    # Stored by tile, read token by token.
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tile_step = gl.allocate_shared_memory(gl.float32, [TOKENS, BLOCK_D], flat)
    tile_input = gl.allocate_shared_memory(gl.float32, [TOKENS, BLOCK_D], flat)
    tile_dy = gl.allocate_shared_memory(gl.float32, [TOKENS, BLOCK_D], flat)
    tile_B = gl.allocate_shared_memory(gl.float32, [TOKENS, BLOCK_N], flat)
    tile_C = gl.allocate_shared_memory(gl.float32, [TOKENS, BLOCK_N], flat)
    steps = _seen_as(tile_step, line)
    inputs = _seen_as(tile_input, line)
    dys = _seen_as(tile_dy, line)
    Bs = _seen_as(tile_B, line)
    Cs = _seen_as(tile_C, line)
    if decay_ptr is not None:
        tile_decay = gl.allocate_shared_memory(gl.float32, [TOKENS, BLOCK_D], flat)
        decays = _seen_as(tile_decay, line)
    part_step = gl.allocate_shared_memory(gl.float32, [GROUP, BLOCK_D * LANES], flat)
    part_input = gl.allocate_shared_memory(gl.float32, [GROUP, BLOCK_D * LANES], flat)
    part_B = gl.allocate_shared_memory(gl.float32, [GROUP, ACROSS * BLOCK_N], flat)
    part_C = gl.allocate_shared_memory(gl.float32, [GROUP, ACROSS * BLOCK_N], flat)
    if z_ptr is not None:
        part_y = gl.allocate_shared_memory(gl.float32, [GROUP, BLOCK_D * LANES], flat)
    if decay_ptr is not None:
        part_decay = gl.allocate_shared_memory(gl.float32, [GROUP, BLOCK_D * LANES], flat)

    in_block = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(1, cn))
    offs_n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, cn))
    offs_state = (origin + in_block)[:, None] * dstate + offs_n[None, :]
    mask = (in_block < left)[:, None] & (offs_n >= 0)[None, :]
    A = gl.load(A_ptr + offs_state, mask=mask, other=0.0).to(gl.float32)
    A = gl.where(A < -1e38, -1e38, A) * 1.4426950408889634  # -inf times the zero step of padding is NaN
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
    token_l = gl.arange(0, GROUP, layout=gl.SliceLayout(1, gl.SliceLayout(2, kcl)))[:, None, None]
    token_a = gl.arange(0, GROUP, layout=gl.SliceLayout(1, gl.SliceLayout(2, kcn)))[:, None, None]
    offs_at = gl.arange(0, GROUP, layout=gl.SliceLayout(1, tan))
    offs_an = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, tan))

    dA = gl.zeros([BLOCK_D, BLOCK_N], gl.float32, layout=cn)
    dD = gl.zeros([GROUP, BLOCK_D], gl.float32, layout=tc)
    dbias = gl.zeros([GROUP, BLOCK_D], gl.float32, layout=tc)
    size = channels.to(gl.int64) * dstate
    for turn in range(gl.program_id(2), nseqs, gl.num_programs(2)):
        sequence = turn.to(gl.int64)
        if cu_seqlens_ptr is None:
            row = sequence
            begin = pid_s * segment
            end = gl.minimum(begin + segment, seqlen)
            borders = sequence * gl.cdiv(seqlen, TOKENS) + begin // TOKENS
        else:
            row = sequence * 0
            begin = _offset(cu_seqlens_ptr, sequence, seqlen)
            end = _offset(cu_seqlens_ptr, sequence + 1, seqlen)
            borders = sequence + begin // TOKENS
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
            rows = _append(rows, decay_ptr + row * stride_decay_b + first * stride_decay_t + origin)
        rows = _fetch(forth, rows, 0, end - begin, 1)
        rows = _fetch(forth, rows, 1, end - begin - TOKENS, 1)
        for j in range(count):
            at = j % 2
            t = begin + j * TOKENS
            gl.store(border + j * size + offs_state, state, mask=mask)
            async_copy.wait_group(1)
            x = next_x.index(at).load(tc).to(gl.float32)
            step = next_dt.index(at).load(tc).to(gl.float32) + bias[None, :]
            if SOFTPLUS:
                step = _softplus(step)
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
                for i in gl.static_range(GROUP):
                    factor = _exp2(_column(steps, g * GROUP + i, cn) * A)
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
            rows = _append(rows, decay_ptr + row * stride_decay_b + first * stride_decay_t + origin)
        rows = _append(rows, C_ptr + row * stride_C_b + first * stride_C_t + group * stride_C_g)
        rows = _append(rows, dy_ptr + (row * seqlen + first) * channels + origin)
        if z_ptr is not None:
            rows = _append(rows, z_ptr + row * stride_z_b + first * stride_z_t + origin)
        rows = _fetch(back, rows, 0, gl.minimum(end - last, count * TOKENS), -1)
        rows = _fetch(back, rows, 1, (count - 1) * TOKENS, -1)
        next_state = gl.load(border + (count - 1) * size + offs_state, mask=mask & (count > 0), other=0.0)
        for turned in range(count):
            at = turned % 2
            j = count - 1 - turned
            t = begin + j * TOKENS
            state = next_state
            next_state = gl.load(border + (j - 1) * size + offs_state, mask=mask & (j > 0), other=0.0)
            async_copy.wait_group(1)
            x = next_x.index(at).load(tc).to(gl.float32)
            step = next_dt.index(at).load(tc).to(gl.float32) + bias[None, :]
            if SOFTPLUS:
                step = _softplus(step)
            inside = (t + offs_t < end)[:, None] & live[None, :]
            step = gl.where(inside, step, 0.0)
            dy = next_dy.index(at).load(tc).to(gl.float32)
            if z_ptr is not None:
                z = next_z.index(at).load(tc).to(gl.float32)
                dy *= z * _sigmoid(z)
            tile_step.store(step)
            tile_input.store(step * x)
            tile_dy.store(dy)
            tile_B.store(next_B.index(at).load(tn).to(gl.float32))
            tile_C.store(next_C.index(at).load(tn).to(gl.float32))
            if decay_ptr is not None:
                given = next_decay.index(at).load(tc).to(gl.float32)
                tile_decay.store(gl.where(inside, given, 1.0))
            starts = (state,)
            for g in gl.static_range(GROUPS - 1):
                for i in gl.static_range(GROUP):
                    factor = _exp2(_column(steps, g * GROUP + i, cn) * A)
                    if decay_ptr is not None:
                        factor *= _column(decays, g * GROUP + i, cn)
                    u = _column(inputs, g * GROUP + i, cn)
                    state = factor * state + u * _line(Bs, g * GROUP + i, cn)
                starts = _append(starts, state)
            for g in gl.static_range(GROUPS - 1, -1, -1):
                state = starts[g]
                powers = ()  # type: Any
                reached = ()  # type: Any
                ys = gl.zeros([GROUP, BLOCK_D, LANES], gl.float32, layout=kcl)
                dCs = gl.zeros([GROUP, ACROSS, BLOCK_N], gl.float32, layout=kcn)
                for i in gl.static_range(GROUP):
                    power = _exp2(_column(steps, g * GROUP + i, cn) * A)
                    before = power * state
                    powers = _append(powers, power)
                    reached = _append(reached, before)
                    if decay_ptr is not None:
                        before *= _column(decays, g * GROUP + i, cn)
                    u = _column(inputs, g * GROUP + i, cn)
                    state = before + u * _line(Bs, g * GROUP + i, cn)
                    if z_ptr is not None:
                        read = state * _line(Cs, g * GROUP + i, cn)
                        ys = gl.where(token_l == i, _over_states(read, LANES, gl.SliceLayout(0, kcl))[None, :, :], ys)
                    fed = state * _column(dys, g * GROUP + i, cn)
                    dCs = gl.where(token_a == i, _over_channels(fed, OWN, gl.SliceLayout(0, kcn))[None, :, :], dCs)
                if z_ptr is not None:
                    part_y.store(gl.reshape(ys, [GROUP, BLOCK_D * LANES]))
                part_C.store(gl.reshape(dCs, [GROUP, ACROSS * BLOCK_N]))
                gl.thread_barrier()  # Else the compiler keeps what was read above in registers that it lacks.
                dsteps = gl.zeros([GROUP, BLOCK_D, LANES], gl.float32, layout=kcl)
                dinputs = gl.zeros([GROUP, BLOCK_D, LANES], gl.float32, layout=kcl)
                ddecays = gl.zeros([GROUP, BLOCK_D, LANES], gl.float32, layout=kcl)
                dBs = gl.zeros([GROUP, ACROSS, BLOCK_N], gl.float32, layout=kcn)
                for i in gl.static_range(GROUP - 1, -1, -1):
                    dy_i = _column(dys, g * GROUP + i, cn)
                    adjoint = dy_i * _line(Cs, g * GROUP + i, cn) + carried
                    # With the power before the decay: a decay of zero has a gradient, too.
                    dlog = reached[i] * adjoint
                    carried = powers[i] * adjoint
                    if decay_ptr is not None:
                        partial = _over_states(dlog, LANES, gl.SliceLayout(0, kcl))
                        ddecays = gl.where(token_l == i, partial[None, :, :], ddecays)
                        given_i = _column(decays, g * GROUP + i, cn)
                        dlog *= given_i
                        carried *= given_i
                    dA += _column(steps, g * GROUP + i, cn) * dlog
                    partial = _over_states(dlog * A, LANES, gl.SliceLayout(0, kcl))
                    dsteps = gl.where(token_l == i, partial[None, :, :], dsteps)
                    B_i = _line(Bs, g * GROUP + i, cn)
                    partial = _over_states(adjoint * B_i, LANES, gl.SliceLayout(0, kcl))
                    dinputs = gl.where(token_l == i, partial[None, :, :], dinputs)
                    fed = adjoint * _column(inputs, g * GROUP + i, cn)
                    dBs = gl.where(token_a == i, _over_channels(fed, OWN, gl.SliceLayout(0, kcn))[None, :, :], dBs)
                part_step.store(gl.reshape(dsteps, [GROUP, BLOCK_D * LANES]))
                part_input.store(gl.reshape(dinputs, [GROUP, BLOCK_D * LANES]))
                if decay_ptr is not None:
                    part_decay.store(gl.reshape(ddecays, [GROUP, BLOCK_D * LANES]))
                part_B.store(gl.reshape(dBs, [GROUP, ACROSS * BLOCK_N]))

                # The sums, and what follows from them token by token.
                here = t + g * GROUP
                token_row = row * seqlen + here
                x = next_x.index(at).slice(g * GROUP, GROUP).load(tc).to(gl.float32)
                raw = next_dt.index(at).slice(g * GROUP, GROUP).load(tc).to(gl.float32) + bias[None, :]
                dy = next_dy.index(at).slice(g * GROUP, GROUP).load(tc).to(gl.float32)
                step = raw
                if SOFTPLUS:
                    step = _softplus(raw)
                inside = (here + offs_g < end)[:, None] & live[None, :]
                out = token_row * channels + origin
                if z_ptr is not None:
                    z = next_z.index(at).slice(g * GROUP, GROUP).load(tc).to(gl.float32)
                    gate = _sigmoid(z)
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
                    draw *= gl.where(raw > 20.0, 1.0, _sigmoid(raw))
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
                offs_cell = (offs_at * (ngroups * dstate))[:, None] + offs_an[None, :]
                inside_n = (here + offs_at < end)[:, None] & (offs_an >= 0)[None, :]
                sums = gl.sum(gl.reshape(part_B.load(tan), [GROUP, ACROSS, BLOCK_N]), axis=1)
                gl.store(dB_ptr + cells + offs_cell, gl.convert_layout(sums, tan, assert_trivial=True), mask=inside_n)
                sums = gl.sum(gl.reshape(part_C.load(tan), [GROUP, ACROSS, BLOCK_N]), axis=1)
                gl.store(dC_ptr + cells + offs_cell, gl.convert_layout(sums, tan, assert_trivial=True), mask=inside_n)
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
