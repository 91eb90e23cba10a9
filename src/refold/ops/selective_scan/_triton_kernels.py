"""The Triton kernels of the Mamba-1 scan and of its step.

The tile of a program is (states, channels), with 32 channels per warp. The exponentials, one per channel, state and
token, limit the speed. If batch and channels do not fill the device, time is cut into segments. A first launch computes
the state and the summed step of each segment, and the scan chains those before its own segment.
"""

from __future__ import annotations

import triton
import triton.language as tl

from refold.ops.triton.math import LOG2E, clip, exp2, sequence, silu, softplus
from refold.ops.triton.slots import place, place_of_token, spread


@triton.jit
def load_token(base_ptr, stride_t, t, offs, mask):
    """Load one token's row as float32."""
    return tl.load(base_ptr + t.to(tl.int64) * stride_t + offs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _selective_scan_fwd_kernel(
    cu_seqlens_ptr, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, initial_ptr,
    segment_state_ptr, segment_step_ptr, y_ptr, final_ptr, decay_ptr,
    seqlen, segment, nsegments, channels, dstate, group_channels,
    stride_x_b, stride_x_t, stride_dt_b, stride_dt_t, stride_B_b, stride_B_t, stride_B_g,
    stride_C_b, stride_C_t, stride_C_g, stride_z_b, stride_z_t, stride_decay_b, stride_decay_t,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, UNROLL: tl.constexpr, SOFTPLUS: tl.constexpr,
    GROUPED: tl.constexpr, LOCAL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of channels, segments, sequences): a program owns BLOCK_D channels of one segment.

    LOCAL writes the segment's own state and summed step; else y, from the state after the segments before it, and the
    final state. With decays there is no step to sum: the segment's factor is a product per state, because decays may
    have no logarithm, and would overflow without the powers. Reads its inputs once. Float32; the last tokens and
    channels may be ragged.
    """
    pid_s = tl.program_id(1)
    pid_k = tl.program_id(2).to(tl.int64)
    offs_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    offs_n = tl.arange(0, BLOCK_N)
    mask_d = offs_d < channels
    mask_n = offs_n < dstate
    mask = mask_n[:, None] & mask_d[None, :]
    offs_state = offs_d[None, :] * dstate + offs_n[:, None]
    if cu_seqlens_ptr is None:
        pid_b = pid_k
        begin = pid_s * segment
        end = tl.minimum(begin + segment, seqlen)
    else:
        pid_b = pid_k * 0
        # Wrong offsets must not lead out of the arrays.
        begin = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + pid_k).to(tl.int32), 0), seqlen)
        end = tl.minimum(tl.load(cu_seqlens_ptr + pid_k + 1).to(tl.int32), seqlen)
    # A rate of -inf must not make NaN of the tokens that fill a block, whose step is zero.
    A = clip(tl.load(A_ptr + offs_state, mask=mask, other=0.0).to(tl.float32), -1e38, 1e38) * LOG2E
    state = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    total = tl.zeros((BLOCK_D,), tl.float32) if decay_ptr is None else tl.full((BLOCK_N, BLOCK_D), 1.0, tl.float32)
    row = pid_k * nsegments * channels
    if not LOCAL:
        if initial_ptr is not None:
            state = tl.load(initial_ptr + pid_k * channels * dstate + offs_state, mask=mask, other=0.0).to(tl.float32)
        for s in range(pid_s):
            before = row + s * channels
            if decay_ptr is None:
                factor = exp2(tl.load(segment_step_ptr + before + offs_d, mask=mask_d, other=0.0)[None, :] * A)
            else:
                factor = tl.load(segment_step_ptr + before * dstate + offs_state, mask=mask, other=0.0)
            own = tl.load(segment_state_ptr + before * dstate + offs_state, mask=mask, other=0.0)
            state = state * factor + own
    bias = tl.zeros((BLOCK_D,), tl.float32)
    if dt_bias_ptr is not None:
        bias = tl.load(dt_bias_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    if D_ptr is not None:
        D = tl.load(D_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    x_base = x_ptr + pid_b * stride_x_b
    dt_base = dt_ptr + pid_b * stride_dt_b
    B_base = B_ptr + pid_b * stride_B_b
    C_base = C_ptr + pid_b * stride_C_b
    if GROUPED:
        groups = offs_d // group_channels
        offs_B = groups[None, :] * stride_B_g + offs_n[:, None]
        offs_C = groups[None, :] * stride_C_g + offs_n[:, None]
        mask_B = mask
    else:
        group = tl.program_id(0) * BLOCK_D // group_channels
        offs_B = group * stride_B_g + offs_n[:, None]
        offs_C = group * stride_C_g + offs_n[:, None]
        mask_B = mask_n[:, None]
    for t0 in range(begin, end, UNROLL):
        for i in tl.static_range(UNROLL):
            t = t0 + i
            inside = t + tl.zeros((BLOCK_D,), tl.int32) < end
            live = mask_d & inside
            live_B = mask_B & (t + tl.zeros((1, 1), tl.int32) < end)
            x = load_token(x_base, stride_x_t, t, offs_d, live)
            step = load_token(dt_base, stride_dt_t, t, offs_d, live) + bias
            B = load_token(B_base, stride_B_t, t, offs_B, live_B)
            if SOFTPLUS:
                step = softplus(step)
            step = tl.where(inside, step, 0.0)
            factor = exp2(step[None, :] * A)
            if decay_ptr is not None:
                decay = load_token(decay_ptr + pid_b * stride_decay_b, stride_decay_t, t, offs_d, live)
                factor *= tl.where(inside, decay, 1.0)[None, :]
            state = state * factor + (x * step)[None, :] * B
            if LOCAL:
                if decay_ptr is None:
                    total += step
                else:
                    total *= factor
            else:
                C = load_token(C_base, stride_C_t, t, offs_C, live_B)
                y = tl.sum(state * C, axis=0)
                if D_ptr is not None:
                    y += D * x
                if z_ptr is not None:
                    y *= silu(load_token(z_ptr + pid_b * stride_z_b, stride_z_t, t, offs_d, live))
                y_row = y_ptr + (pid_b * seqlen + t) * channels
                tl.store(y_row + offs_d, y.to(y_ptr.dtype.element_ty), mask=live)
    if LOCAL:
        tl.store(segment_state_ptr + (row + pid_s * channels) * dstate + offs_state, state, mask=mask)
        if decay_ptr is None:
            tl.store(segment_step_ptr + row + pid_s * channels + offs_d, total, mask=mask_d)
        else:
            tl.store(segment_step_ptr + (row + pid_s * channels) * dstate + offs_state, total, mask=mask)
    elif pid_s == nsegments - 1:
        tl.store(final_ptr + pid_k * channels * dstate + offs_state, state.to(final_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _selective_scan_step_kernel(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, decay_ptr, state_ptr, new_state_ptr, y_ptr,
    source_ptr, target_ptr, accepted_ptr, offsets_ptr,
    ntokens, channels, dstate, group_channels,
    stride_x_b, stride_x_t, stride_dt_b, stride_dt_t, stride_B_b, stride_B_t, stride_B_g,
    stride_C_b, stride_C_t, stride_C_g, stride_z_b, stride_z_t, stride_decay_b, stride_decay_t,
    stride_y_b, stride_y_t, stride_s_b, stride_s_d, stride_s_n,
    rows, slots, pad, columns, kept, stride_source_k, stride_source_m, stride_target_k, stride_target_m,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of channels, sequences): a program owns BLOCK_D channels and all their states, for all tokens.

    Reads and writes its part of the state once; arithmetic is float32 and outputs use the unrounded state. Slots
    as in the step of `ssd`.
    """
    offs_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    offs_n = tl.arange(0, BLOCK_N)
    pid_b = tl.program_id(1).to(tl.int64)
    mask_d = offs_d < channels
    mask = mask_d[:, None] & (offs_n < dstate)[None, :]
    offs_A = offs_d[:, None] * dstate + offs_n[None, :]
    offs_state = offs_d[:, None] * stride_s_d + offs_n[None, :] * stride_s_n
    groups = offs_d // group_channels
    A = tl.load(A_ptr + offs_A, mask=mask, other=0.0).to(tl.float32) * LOG2E
    row, read, write, mask_s = pid_b, pid_b, pid_b, mask
    if target_ptr is not None:
        read, write, valid, nothing = place(source_ptr, target_ptr, accepted_ptr, pid_b, slots, pad, columns,
                                            stride_source_k, stride_source_m, stride_target_k)  # fmt: skip
        if offsets_ptr is not None:
            begin, end = sequence(offsets_ptr, pid_b, True, rows)
            row = begin.to(tl.int64)
            ntokens = end - begin
            valid &= end > begin
        mask_s = spread(valid, mask)
    state = tl.load(state_ptr + read * stride_s_b + offs_state, mask=mask_s, other=0.0).to(tl.float32)
    for t in range(ntokens):
        x = tl.load(x_ptr + row * stride_x_b + t * stride_x_t + offs_d, mask=mask_d, other=0.0).to(tl.float32)
        step = tl.load(dt_ptr + row * stride_dt_b + t * stride_dt_t + offs_d, mask=mask_d, other=0.0).to(tl.float32)
        if dt_bias_ptr is not None:
            step += tl.load(dt_bias_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
        if SOFTPLUS:
            step = softplus(step)
        B_row = B_ptr + row * stride_B_b + t * stride_B_t + groups[:, None] * stride_B_g
        C_row = C_ptr + row * stride_C_b + t * stride_C_t + groups[:, None] * stride_C_g
        B = tl.load(B_row + offs_n[None, :], mask=mask, other=0.0).to(tl.float32)
        C = tl.load(C_row + offs_n[None, :], mask=mask, other=0.0).to(tl.float32)
        factor = exp2(step[:, None] * A)
        if decay_ptr is not None:
            decay_row = decay_ptr + row * stride_decay_b + t * stride_decay_t
            factor *= tl.load(decay_row + offs_d, mask=mask_d, other=0.0).to(tl.float32)[:, None]
        state = state * factor + (x * step)[:, None] * B
        y = tl.sum(state * C, axis=1)
        if D_ptr is not None:
            y += tl.load(D_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32) * x
        if z_ptr is not None:
            z_row = z_ptr + row * stride_z_b + t * stride_z_t
            y *= silu(tl.load(z_row + offs_d, mask=mask_d, other=0.0).to(tl.float32))
        if target_ptr is not None:
            y = tl.where(valid, y, nothing)
        y_row = y_ptr + row * stride_y_b + t * stride_y_t
        tl.store(y_row + offs_d, y.to(y_ptr.dtype.element_ty), mask=mask_d)
        if accepted_ptr is not None:
            slot, own = place_of_token(target_ptr, pid_b, t, slots, pad, kept, stride_target_k, stride_target_m)
            tl.store(new_state_ptr + slot * stride_s_b + offs_state, state.to(new_state_ptr.dtype.element_ty),
                     mask=spread(own, mask_s))  # fmt: skip
    if accepted_ptr is None:
        tl.store(new_state_ptr + write * stride_s_b + offs_state, state.to(new_state_ptr.dtype.element_ty),
                 mask=mask_s)  # fmt: skip
