"""`_selective_scan_fwd_kernel` with its layout pinned for NVIDIA GPUs: a lane a channel, all states in its registers.

Left to itself the compiler spreads states over lanes, and then shuffles for every sum over them. The next token's rows
are loaded while this one's are used, since loads do not move above the stores of y.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _exp2(v):
    """2**v, with denormal results flushed to 0."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [v], gl.float32, True, 1)


@gluon.jit
def _softplus(v):
    """log(1 + exp(v)) up to v = 20, v beyond; accurate to float32 also where exp(v) is far below 1."""
    u = _exp2(gl.minimum(v, 20.0) * 1.4426950408889634)
    w = 1.0 + u
    log1p = gl.where(w == 1.0, u, gl.log(w) * (u / gl.where(w == 1.0, 1.0, w - 1.0)))
    return gl.where(v <= 20.0, log1p, v)


@gluon.jit
def _selective_scan_fwd_lanes_kernel(
    cu_seqlens_ptr, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, initial_ptr,
    segment_state_ptr, segment_step_ptr, y_ptr, final_ptr,
    seqlen, segment, nsegments, channels, dstate, group_channels,
    stride_x_b, stride_x_t, stride_dt_b, stride_dt_t, stride_B_b, stride_B_t, stride_B_g,
    stride_C_b, stride_C_t, stride_C_g, stride_z_b, stride_z_t,
    BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, SOFTPLUS: gl.constexpr, LOCAL: gl.constexpr,
):  # fmt: skip
    """Grid (blocks of channels, segments, sequences): a program owns BLOCK_D channels of one segment.

    LOCAL writes the segment's own state and summed step; else y, from the state that the segments before it leave
    behind, and the final state. Reads its inputs once. Float32; the last channels may be ragged.
    """
    tile: gl.constexpr = gl.BlockedLayout([BLOCK_N, 1], [1, 32], [1, gl.num_warps()], [0, 1])
    pid_s = gl.program_id(1)
    pid_k = gl.program_id(2).to(gl.int64)
    offs_d = gl.program_id(0) * BLOCK_D + gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, tile))
    offs_n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, tile))
    live = offs_d < channels
    mask = live[None, :] & (offs_n[:, None] >= 0)
    offs_state = offs_d[None, :] * BLOCK_N + offs_n[:, None]
    if cu_seqlens_ptr is None:
        pid_b = pid_k
        begin = pid_s * segment
        end = gl.minimum(begin + segment, seqlen)
    else:
        pid_b = pid_k * 0
        begin = gl.load(cu_seqlens_ptr + pid_k).to(gl.int32)
        end = gl.load(cu_seqlens_ptr + pid_k + 1).to(gl.int32)
    A = gl.load(A_ptr + offs_state, mask=mask, other=0.0).to(gl.float32) * 1.4426950408889634
    state = gl.zeros([BLOCK_N, BLOCK_D], gl.float32, layout=tile)
    total = gl.zeros([BLOCK_D], gl.float32, layout=gl.SliceLayout(0, tile))
    row = pid_k * nsegments * channels
    if not LOCAL:
        if initial_ptr is not None:
            initial = initial_ptr + pid_k * channels * BLOCK_N
            state = gl.load(initial + offs_state, mask=mask, other=0.0).to(gl.float32)
        for s in range(pid_s):
            before = row + s * channels
            summed = gl.load(segment_step_ptr + before + offs_d, mask=live, other=0.0)
            own = gl.load(segment_state_ptr + before * BLOCK_N + offs_state, mask=mask, other=0.0)
            state = state * _exp2(summed[None, :] * A) + own
    if dt_bias_ptr is not None:
        bias = gl.load(dt_bias_ptr + offs_d, mask=live, other=0.0).to(gl.float32)
    if D_ptr is not None:
        D = gl.load(D_ptr + offs_d, mask=live, other=0.0).to(gl.float32)
    group = gl.program_id(0) * BLOCK_D // group_channels
    last = gl.maximum(end - 1, 0)
    first = gl.minimum(begin, last).to(gl.int64)
    x_row = x_ptr + pid_b * stride_x_b + first * stride_x_t
    dt_row = dt_ptr + pid_b * stride_dt_b + first * stride_dt_t
    B_row = B_ptr + pid_b * stride_B_b + first * stride_B_t + group * stride_B_g
    C_row = C_ptr + pid_b * stride_C_b + first * stride_C_t + group * stride_C_g
    y_row = y_ptr + (pid_b * seqlen + first) * channels
    next_x = gl.load(x_row + offs_d, mask=live, other=0.0)
    next_dt = gl.load(dt_row + offs_d, mask=live, other=0.0)
    next_B = gl.load(B_row + offs_n)
    if not LOCAL:
        next_C = gl.load(C_row + offs_n)
        if z_ptr is not None:
            z_row = z_ptr + pid_b * stride_z_b + first * stride_z_t
            next_z = gl.load(z_row + offs_d, mask=live, other=0.0)
    for t in range(begin, end):
        x = next_x.to(gl.float32)
        step = next_dt.to(gl.float32)
        B = next_B.to(gl.float32)
        more = (t < last).to(gl.int32)
        x_row += more * stride_x_t
        dt_row += more * stride_dt_t
        B_row += more * stride_B_t
        next_x = gl.load(x_row + offs_d, mask=live, other=0.0)
        next_dt = gl.load(dt_row + offs_d, mask=live, other=0.0)
        next_B = gl.load(B_row + offs_n)
        if not LOCAL:
            C = next_C.to(gl.float32)
            C_row += more * stride_C_t
            next_C = gl.load(C_row + offs_n)
            if z_ptr is not None:
                z = next_z.to(gl.float32)
                z_row += more * stride_z_t
                next_z = gl.load(z_row + offs_d, mask=live, other=0.0)
        if dt_bias_ptr is not None:
            step += bias
        if SOFTPLUS:
            step = _softplus(step)
        state = state * _exp2(step[None, :] * A) + (x * step)[None, :] * B[:, None]
        if LOCAL:
            total += step
        else:
            y = gl.sum(state * C[:, None], axis=0)
            if D_ptr is not None:
                y += D * x
            if z_ptr is not None:
                y *= z / (1.0 + _exp2(z * -1.4426950408889634))
            gl.store(y_row + offs_d, y.to(y_ptr.dtype.element_ty), mask=live)
            y_row += channels
    if LOCAL:
        gl.store(segment_state_ptr + (row + pid_s * channels) * BLOCK_N + offs_state, state, mask=mask)
        gl.store(segment_step_ptr + row + pid_s * channels + offs_d, total, mask=live)
    elif pid_s == nsegments - 1:
        final = final_ptr + pid_k * channels * BLOCK_N
        gl.store(final + offs_state, state.to(final_ptr.dtype.element_ty), mask=mask)
