"""The Triton kernels of the backward of the Mamba-1 scan, for any sizes, strides and packs.

A program goes over time twice, with a block of channels of one group. The first pass stores the state at every border
between TOKENS tokens. The second pass goes back from border to border. It computes the states between two borders
again, and then follows the adjoints against time,

    λ[t] = C[t] dy[t] + f[t+1] λ[t+1]         with f[t] = decay[t] exp(s[t] A), and the gradient of the final state last

If batch and channels do not fill the device, time is cut into segments. A launch before the main one computes three
values for each segment: its own state, its factor, and the gradient that its own outputs send back over its first
border. All three come from one pass in the direction of time, because the last is the sum of C[t] dy[t] times the
product of f up to t.

Sums over the channels of a group (dB, dC) and over batch and time (dA, dD, the bias) are written per program as rows of
float32, which `refold.ops.torch.row_sums` adds up in a fixed order.
"""

from __future__ import annotations

from typing import Any  # noqa: F401 - in type comments

import triton
import triton.language as tl

from refold.ops.selective_scan._triton_kernels import load_token
from refold.ops.triton.math import LOG2E, clip, exp2, sigmoid, softplus

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _selective_scan_bwd_segments_kernel(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, z_ptr, dt_bias_ptr, decay_ptr, dy_ptr, state_ptr, adjoint_ptr, factor_ptr,
    seqlen, segment, nsegments, channels, dstate, group_channels, group_blocks,
    stride_x_b, stride_x_t, stride_dt_b, stride_dt_t, stride_B_b, stride_B_t, stride_B_g,
    stride_C_b, stride_C_t, stride_C_g, stride_z_b, stride_z_t, stride_decay_b, stride_decay_t,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, TOKENS: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of channels, segments, batch): of a segment its own state, its adjoint at its begin, its factor."""
    group = tl.program_id(0) // group_blocks
    pid_s = tl.program_id(1)
    pid_b = tl.program_id(2).to(tl.int64)
    inside_group = tl.program_id(0) % group_blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    offs_d = group * group_channels + inside_group
    offs_n = tl.arange(0, BLOCK_N)
    mask_d = inside_group < group_channels
    mask_n = offs_n < dstate
    mask = mask_d[:, None] & mask_n[None, :]
    offs_state = offs_d[:, None] * dstate + offs_n[None, :]
    # A rate of -inf must not make NaN of the tokens that fill a block, whose step is zero.
    A = clip(tl.load(A_ptr + offs_state, mask=mask, other=0.0).to(tl.float32), -1e38, 1e38) * LOG2E
    bias = tl.zeros((BLOCK_D,), tl.float32)
    if dt_bias_ptr is not None:
        bias = tl.load(dt_bias_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    state = tl.zeros((BLOCK_D, BLOCK_N), tl.float32)
    adjoint = tl.zeros((BLOCK_D, BLOCK_N), tl.float32)
    factor = tl.full((BLOCK_D, BLOCK_N), 1.0, tl.float32)
    begin = pid_s * segment
    end = tl.minimum(begin + segment, seqlen)
    for first in range(begin, end, TOKENS):
        for i in tl.static_range(TOKENS):
            t = first + i
            inside = t + tl.zeros((BLOCK_D,), tl.int32) < end
            live = mask_d & inside
            live_n = mask_n & (t + tl.zeros((BLOCK_N,), tl.int32) < end)
            x = load_token(x_ptr + pid_b * stride_x_b, stride_x_t, t, offs_d, live)
            step = load_token(dt_ptr + pid_b * stride_dt_b, stride_dt_t, t, offs_d, live) + bias
            if SOFTPLUS:
                step = softplus(step)
            step = tl.where(inside, step, 0.0)
            B = load_token(B_ptr + pid_b * stride_B_b + group * stride_B_g, stride_B_t, t, offs_n, live_n)
            C = load_token(C_ptr + pid_b * stride_C_b + group * stride_C_g, stride_C_t, t, offs_n, live_n)
            own = exp2(step[:, None] * A)
            if decay_ptr is not None:
                decay = load_token(decay_ptr + pid_b * stride_decay_b, stride_decay_t, t, offs_d, live)
                own *= tl.where(inside, decay, 1.0)[:, None]
            factor *= own
            state = state * own + (x * step)[:, None] * B[None, :]
            if dy_ptr is not None:
                dy = load_token(dy_ptr + pid_b * seqlen * channels, channels, t, offs_d, live)
                if z_ptr is not None:
                    z = load_token(z_ptr + pid_b * stride_z_b, stride_z_t, t, offs_d, live)
                    dy *= z * sigmoid(z)
                adjoint += factor * dy[:, None] * C[None, :]
    place = (pid_b * nsegments + pid_s) * channels * dstate + offs_state
    tl.store(state_ptr + place, state, mask=mask)
    tl.store(adjoint_ptr + place, adjoint, mask=mask)
    tl.store(factor_ptr + place, factor, mask=mask)


@triton.jit
def _selective_scan_bwd_kernel(
    cu_seqlens_ptr, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, decay_ptr, initial_ptr, dy_ptr,
    dfinal_ptr, segment_state_ptr, segment_adjoint_ptr, segment_factor_ptr, border_ptr,
    dx_ptr, ddt_ptr, dz_ptr, ddecay_ptr, dinitial_ptr, dB_ptr, dC_ptr, dA_ptr, dD_ptr, dbias_ptr, row_size,
    batch, seqlen, nseqs, segment, nsegments, channels, dstate, group_channels, group_blocks,
    stride_x_b, stride_x_t, stride_dt_b, stride_dt_t, stride_B_b, stride_B_t, stride_B_g,
    stride_C_b, stride_C_t, stride_C_g, stride_z_b, stride_z_t, stride_decay_b, stride_decay_t,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, TOKENS: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of channels, segments, rows): a program owns BLOCK_D channels of one segment of some sequences.

    Program ``r`` of the last axis takes the sequences r, r + rows, ... Float32. Tokens, channels, states, and sequences
    may be ragged. What ``dA_ptr``, ``dD_ptr`` and ``dbias_ptr`` point to is the first of rows of ``row_size`` elements.
    """
    ngroups = tl.num_programs(0) // group_blocks
    group = tl.program_id(0) // group_blocks
    block = tl.program_id(0) % group_blocks
    pid_s = tl.program_id(1)
    inside_group = block * BLOCK_D + tl.arange(0, BLOCK_D)
    offs_d = group * group_channels + inside_group
    offs_n = tl.arange(0, BLOCK_N)
    mask_d = inside_group < group_channels
    mask_n = offs_n < dstate
    mask = mask_d[:, None] & mask_n[None, :]
    offs_state = offs_d[:, None] * dstate + offs_n[None, :]
    # A rate of -inf must not make NaN of the tokens that fill a block, whose step is zero.
    A = clip(tl.load(A_ptr + offs_state, mask=mask, other=0.0).to(tl.float32), -1e38, 1e38) * LOG2E
    bias = tl.zeros((BLOCK_D,), tl.float32)
    if dt_bias_ptr is not None:
        bias = tl.load(dt_bias_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    D = tl.zeros((BLOCK_D,), tl.float32)
    if D_ptr is not None:
        D = tl.load(D_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    dA = tl.zeros((BLOCK_D, BLOCK_N), tl.float32)
    dD = tl.zeros((BLOCK_D,), tl.float32)
    dbias = tl.zeros((BLOCK_D,), tl.float32)
    for turn in range(tl.program_id(2), nseqs, tl.num_programs(2)):
        sequence = tl.program_id(2).to(tl.int64) * 0 + turn
        if cu_seqlens_ptr is None:
            row = sequence
            begin = pid_s * segment
            end = tl.minimum(begin + segment, seqlen)
            borders = sequence * tl.cdiv(seqlen, TOKENS) + begin // TOKENS
        else:
            row = sequence * 0
            # Wrong offsets must not lead out of the arrays.
            begin = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + sequence).to(tl.int32), 0), seqlen)
            end = tl.minimum(tl.load(cu_seqlens_ptr + sequence + 1).to(tl.int32), seqlen)
            borders = sequence + begin // TOKENS
        count = tl.cdiv(tl.maximum(end - begin, 0), TOKENS)
        x_base = x_ptr + row * stride_x_b
        dt_base = dt_ptr + row * stride_dt_b
        B_base = B_ptr + row * stride_B_b + group * stride_B_g
        C_base = C_ptr + row * stride_C_b + group * stride_C_g
        segments = sequence * nsegments * channels * dstate + offs_state

        state = tl.zeros((BLOCK_D, BLOCK_N), tl.float32)
        if initial_ptr is not None:
            state = tl.load(initial_ptr + sequence * channels * dstate + offs_state, mask=mask, other=0.0)
            state = state.to(tl.float32)
        for s in range(pid_s):
            at = segments + s * channels * dstate
            own = tl.load(segment_state_ptr + at, mask=mask, other=0.0)
            state = state * tl.load(segment_factor_ptr + at, mask=mask, other=0.0) + own
        for j in range(count):
            tl.store(border_ptr + (borders + j) * channels * dstate + offs_state, state, mask=mask)
            for i in tl.static_range(TOKENS):
                t = begin + j * TOKENS + i
                inside = t + tl.zeros((BLOCK_D,), tl.int32) < end
                live = mask_d & inside
                live_n = mask_n & (t + tl.zeros((BLOCK_N,), tl.int32) < end)
                x = load_token(x_base, stride_x_t, t, offs_d, live)
                step = load_token(dt_base, stride_dt_t, t, offs_d, live) + bias
                if SOFTPLUS:
                    step = softplus(step)
                step = tl.where(inside, step, 0.0)
                B = load_token(B_base, stride_B_t, t, offs_n, live_n)
                factor = exp2(step[:, None] * A)
                if decay_ptr is not None:
                    decay = load_token(decay_ptr + row * stride_decay_b, stride_decay_t, t, offs_d, live)
                    factor *= tl.where(inside, decay, 1.0)[:, None]
                state = state * factor + (x * step)[:, None] * B[None, :]
        tl.debug_barrier()  # Other threads may read what these wrote.

        carried = tl.zeros((BLOCK_D, BLOCK_N), tl.float32)  # f[t+1] λ[t+1], or the gradient of the final state
        if dfinal_ptr is not None:
            carried = tl.load(dfinal_ptr + sequence * channels * dstate + offs_state, mask=mask, other=0.0)
            carried = carried.to(tl.float32)
        for s in range(nsegments - 1 - pid_s):
            at = segments + (nsegments - 1 - s) * channels * dstate
            own = tl.load(segment_adjoint_ptr + at, mask=mask, other=0.0)
            carried = carried * tl.load(segment_factor_ptr + at, mask=mask, other=0.0) + own
        for back in range(count):
            first = begin + (count - 1 - back) * TOKENS
            border = border_ptr + (borders + count - 1 - back) * channels * dstate
            state = tl.load(border + offs_state, mask=mask, other=0.0)
            befores = ()  # type: Any
            powers = ()  # type: Any
            xs = ()  # type: Any
            raws = ()  # type: Any
            steps = ()  # type: Any
            decays = ()  # type: Any
            dys = ()  # type: Any
            for i in tl.static_range(TOKENS):
                t = first + i
                inside = t + tl.zeros((BLOCK_D,), tl.int32) < end
                live = mask_d & inside
                live_n = mask_n & (t + tl.zeros((BLOCK_N,), tl.int32) < end)
                token = row * seqlen + t
                x = load_token(x_base, stride_x_t, t, offs_d, live)
                raw = load_token(dt_base, stride_dt_t, t, offs_d, live) + bias
                step = raw
                if SOFTPLUS:
                    step = softplus(raw)
                step = tl.where(inside, step, 0.0)
                B = load_token(B_base, stride_B_t, t, offs_n, live_n)
                C = load_token(C_base, stride_C_t, t, offs_n, live_n)
                power = exp2(step[:, None] * A)
                befores += (state,)
                powers += (power,)
                xs += (x,)
                raws += (raw,)
                steps += (step,)
                if decay_ptr is not None:
                    decay = load_token(decay_ptr + row * stride_decay_b, stride_decay_t, t, offs_d, live)
                    decay = tl.where(inside, decay, 1.0)
                    decays += (decay,)
                    power *= decay[:, None]
                state = state * power + (x * step)[:, None] * B[None, :]
                dy = tl.zeros((BLOCK_D,), tl.float32)
                if dy_ptr is not None:
                    dy = tl.load(dy_ptr + token * channels + offs_d, mask=live, other=0.0).to(tl.float32)
                if z_ptr is not None:
                    z = load_token(z_ptr + row * stride_z_b, stride_z_t, t, offs_d, live)
                    y = tl.sum(state * C[None, :], axis=1)
                    if D_ptr is not None:
                        y += D * x
                    gate = sigmoid(z)
                    dz = dy * y * (gate + z * gate * (1.0 - gate))
                    tl.store(dz_ptr + token * channels + offs_d, dz.to(dz_ptr.dtype.element_ty), mask=live)
                    dy *= z * gate
                dys += (dy,)
                dC = tl.sum(state * dy[:, None], axis=0)
                cell = ((block.to(tl.int64) * batch * seqlen + token) * ngroups + group) * dstate + offs_n
                tl.store(dC_ptr + cell, dC, mask=live_n)
            for k in tl.static_range(TOKENS - 1, -1, -1):
                t = first + k
                inside = t + tl.zeros((BLOCK_D,), tl.int32) < end
                live = mask_d & inside
                live_n = mask_n & (t + tl.zeros((BLOCK_N,), tl.int32) < end)
                token = row * seqlen + t
                B = load_token(B_base, stride_B_t, t, offs_n, live_n)
                C = load_token(C_base, stride_C_t, t, offs_n, live_n)
                adjoint = C[None, :] * dys[k][:, None] + carried
                carried = powers[k] * adjoint
                # With the power before the decay: a decay of zero has a gradient, too.
                # A state that is not finite must not reach A through the zero steps after the end.
                dlog = tl.where(inside[:, None], carried * befores[k], 0.0)
                if decay_ptr is not None:
                    ddecay = tl.sum(dlog, axis=1)
                    place = ddecay_ptr + token * channels + offs_d
                    tl.store(place, ddecay.to(ddecay_ptr.dtype.element_ty), mask=live)
                    dlog *= decays[k][:, None]
                    carried *= decays[k][:, None]
                dinput = tl.sum(adjoint * B[None, :], axis=1)
                dA += steps[k][:, None] * dlog
                draw = tl.sum(dlog * A, axis=1) * LN2 + dinput * xs[k]
                if SOFTPLUS:
                    draw *= tl.where(raws[k] > 20.0, 1.0, sigmoid(raws[k]))
                draw = tl.where(inside, draw, 0.0)
                dB = tl.sum(adjoint * (xs[k] * steps[k])[:, None], axis=0)
                cell = ((block.to(tl.int64) * batch * seqlen + token) * ngroups + group) * dstate + offs_n
                tl.store(dB_ptr + cell, dB, mask=live_n)
                tl.store(ddt_ptr + token * channels + offs_d, draw.to(ddt_ptr.dtype.element_ty), mask=live)
                dx = dinput * steps[k]
                if D_ptr is not None:
                    dx += D * dys[k]
                    dD += dys[k] * xs[k]
                tl.store(dx_ptr + token * channels + offs_d, dx.to(dx_ptr.dtype.element_ty), mask=live)
                dbias += draw
        if dinitial_ptr is not None and pid_s == 0:
            place = dinitial_ptr + sequence * channels * dstate + offs_state
            tl.store(place, carried.to(dinitial_ptr.dtype.element_ty), mask=mask)
        tl.debug_barrier()
    own = (tl.program_id(2).to(tl.int64) * nsegments + pid_s) * row_size
    tl.store(dA_ptr + own + offs_state, dA, mask=mask)
    if D_ptr is not None:
        tl.store(dD_ptr + own + offs_d, dD, mask=mask_d)
    if dt_bias_ptr is not None:
        tl.store(dbias_ptr + own + offs_d, dbias, mask=mask_d)
