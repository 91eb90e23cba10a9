"""Causal depthwise convolution and its step on GPUs with Triton: one launch each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from refold.ops.causal_conv1d.spec import SPEC, STEP
from refold.ops.torch.launch import INTERPRETED, Launch, current_stream, last_contiguous, planned, refusal
from refold.ops.torch.plans import contiguous, fresh, fresh_like
from refold.ops.torch.row_sums import RowSums
from refold.ops.torch.step_plans import planned_steps
from refold.ops.torch.tables import device_limits
from refold.ops.triton.math import sigmoid, silu

ROWS = 10  # Tokens whose loads are in flight together.
BLOCK_D = 128  # Channels a program, which is one warp.
# The same for the backward, whose programs own several tiles; and how many programs per multiprocessor are enough.
BACKWARD_ROWS, BACKWARD_BLOCK_D, BACKWARD_TILES, BACKWARD_PROGRAMS = 8, 64, 16, 32

supports = refusal


@triton.jit
def _offset(cu_seqlens_ptr, i, seqlen):
    """Load an offset of a pack; a wrong one must not lead out of the arrays."""
    return tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + i).to(tl.int32), 0), seqlen)


@triton.jit
def _live(mask_d, offs_d, condition):
    """Return the mask of channels where a scalar condition holds; the interpreter takes no scalar into a mask."""
    return mask_d & (offs_d * 0 + condition != 0)


@triton.jit
def _sequence_of(cu_seqlens_ptr, token, nseqs):
    """Return the sequence that holds a token: the last that begins at or before it and is not empty."""
    seq = token * 0
    span = nseqs
    while span > 1:
        half = span // 2
        seq = tl.where(tl.load(cu_seqlens_ptr + seq + half).to(tl.int32) <= token, seq + half, seq)
        span -= half
    return seq


@triton.jit
def _causal_conv1d_fwd_kernel(
    cu_seqlens_ptr, x_ptr, weight_ptr, bias_ptr, initial_ptr, y_ptr, final_ptr,
    seqlen, channels, nseqs, stride_x_b, stride_x_t,
    WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, BLOCK_D: tl.constexpr,
    SILU: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of channels, blocks of time, batch): a program owns a block of y; the first ones write final states.

    Walks TILES times ROWS tokens with the last WIDTH - 1 in registers, so that each input is read once. Float32
    sums. Time, channels and sequences may be ragged.
    """
    offs_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    pid_t = tl.program_id(1)
    pid_b = tl.program_id(2).to(tl.int64)
    mask_d = offs_d < channels
    x_base = x_ptr + pid_b * stride_x_b + offs_d
    y_base = y_ptr + pid_b * seqlen * channels + offs_d
    first = pid_t * (TILES * ROWS)
    if VARLEN:
        seq = _sequence_of(cu_seqlens_ptr, first, nseqs)
        begin = _offset(cu_seqlens_ptr, seq, seqlen)
        end = _offset(cu_seqlens_ptr, seq + 1, seqlen)
    bias = tl.zeros((BLOCK_D,), tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    weights = ()  # type: Any
    for k in tl.static_range(WIDTH):
        weights += (tl.load(weight_ptr + offs_d * WIDTH + k, mask=mask_d, other=0.0).to(tl.float32),)
    window = ()  # type: Any
    for k in tl.static_range(WIDTH - 1):
        t = first + k - (WIDTH - 1)
        inside = (t >= 0) & (t < seqlen)
        tap = tl.load(x_base + t.to(tl.int64) * stride_x_t, mask=_live(mask_d, offs_d, inside), other=0.0)
        tap = tap.to(tl.float32)
        if initial_ptr is not None and not VARLEN:
            cell = (pid_b * channels + offs_d) * (WIDTH - 1) + (t + WIDTH - 1)
            tap += tl.load(initial_ptr + cell, mask=_live(mask_d, offs_d, t < 0), other=0.0).to(tl.float32)
        window += (tap,)
    for i in range(TILES):
        rows = window
        for j in tl.static_range(ROWS):
            t = first + i * ROWS + j
            row = tl.load(x_base + t.to(tl.int64) * stride_x_t, mask=_live(mask_d, offs_d, t < seqlen), other=0.0)
            rows += (row.to(tl.float32),)
        for j in tl.static_range(ROWS):
            t = first + i * ROWS + j
            if VARLEN:
                while (t >= end) & (seq < nseqs - 1):
                    seq += 1
                    begin = _offset(cu_seqlens_ptr, seq, seqlen)
                    end = _offset(cu_seqlens_ptr, seq + 1, seqlen)
            y = bias
            for k in tl.static_range(WIDTH):
                tap = rows[j + k]
                weight = weights[k]
                if VARLEN and k < WIDTH - 1:
                    place = t - begin + k  # in initial state and inputs of the sequence, one after the other
                    tap = tl.where(place >= WIDTH - 1, tap, 0.0)
                    if initial_ptr is not None:
                        cell = (seq.to(tl.int64) * channels + offs_d) * (WIDTH - 1) + place
                        early = _live(mask_d, offs_d, (place >= 0) & (place < WIDTH - 1))
                        tap += tl.load(initial_ptr + cell, mask=early, other=0.0).to(tl.float32)
                    else:
                        weight = tl.where(place >= WIDTH - 1, weight, 0.0)
                y += tap * weight
            if SILU:
                y = silu(y)
            y_row = y_base + t.to(tl.int64) * channels
            tl.store(y_row, y.to(y_ptr.dtype.element_ty), mask=_live(mask_d, offs_d, t < seqlen))
        window = rows[ROWS:]
    # The first tokens again: what is not there must not be multiplied by a weight, which may be infinite.
    NOTHING_BEFORE: tl.constexpr = initial_ptr is None and not VARLEN
    if NOTHING_BEFORE and pid_t == 0:
        there = ()  # type: Any
        for e in tl.static_range(WIDTH - 1):
            live_e = _live(mask_d, offs_d, e < seqlen)
            there += (tl.load(x_base + e * stride_x_t, mask=live_e, other=0.0).to(tl.float32),)
            sum = bias
            for k in tl.static_range(WIDTH - 1 - e, WIDTH):
                sum += there[e + k - (WIDTH - 1)] * weights[k]
            if SILU:
                sum = silu(sum)
            tl.store(y_base + e * channels, sum.to(y_ptr.dtype.element_ty), mask=live_e)
    offs_w = tl.arange(0, BLOCK_W)
    live = mask_d[:, None] & (offs_w < WIDTH - 1)[None, :]
    for s in range(pid_t, nseqs if VARLEN else 1, tl.num_programs(1)):
        origin = 0
        length = seqlen
        cells = (pid_b + s) * channels * (WIDTH - 1) + offs_d[:, None] * (WIDTH - 1)
        if VARLEN:
            origin = _offset(cu_seqlens_ptr, s, seqlen)
            length = tl.maximum(_offset(cu_seqlens_ptr, s + 1, seqlen) - origin, 0)
        place = length + offs_w  # in initial state and inputs, one after the other
        source = (origin + place - (WIDTH - 1)).to(tl.int64)
        new = tl.load(x_base[:, None] + source[None, :] * stride_x_t,
                      mask=live & (place >= WIDTH - 1)[None, :], other=0.0).to(tl.float32)  # fmt: skip
        if initial_ptr is not None:
            new += tl.load(initial_ptr + cells + place[None, :], mask=live & (place < WIDTH - 1)[None, :],
                           other=0.0).to(tl.float32)  # fmt: skip
        tl.store(final_ptr + cells + offs_w[None, :], new.to(final_ptr.dtype.element_ty), mask=live)


@triton.jit
def _silu_slope(v):
    gate = sigmoid(v)
    return gate * (1.0 + v * (1.0 - gate))


@triton.jit
def _causal_conv1d_bwd_kernel(
    cu_seqlens_ptr, x_ptr, weight_ptr, bias_ptr, initial_ptr, dy_ptr, dfinal_ptr, dx_ptr, dinitial_ptr, sums_ptr,
    seqlen, channels, nseqs, stride_x_b, stride_x_t,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, BLOCK_D: tl.constexpr, SILU: tl.constexpr,
    VARLEN: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of channels, blocks of time, batch): a program owns TILES * ROWS tokens of dx.

    It walks over them and WIDTH - 1 more, with the last WIDTH - 1 inputs and gradients g of the sums before the
    activation in registers: dx[t] = Σ_j weight[j] g[t + (w-1) - j]. Its tokens' parts of dweight and dbias leave as a
    row of ``sums_ptr``, (channels, WIDTH + 1). The first programs form dinitial. Float32; all sizes may be ragged.
    """
    FRONT: tl.constexpr = WIDTH - 1
    offs_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    pid_t = tl.program_id(1)
    pid_b = tl.program_id(2).to(tl.int64)
    mask_d = offs_d < channels
    x_base = x_ptr + pid_b * stride_x_b + offs_d
    dy_base = dy_ptr + pid_b * seqlen * channels + offs_d
    dx_base = dx_ptr + pid_b * seqlen * channels + offs_d
    first = pid_t * (TILES * ROWS)
    # The sequences of the token read and of the token written, WIDTH - 1 tokens before.
    seq = pid_t * 0
    begin = 0
    end = seqlen
    out_seq = seq
    out_end = end
    if VARLEN:
        seq = _sequence_of(cu_seqlens_ptr, first, nseqs)
        begin = _offset(cu_seqlens_ptr, seq, seqlen)
        end = _offset(cu_seqlens_ptr, seq + 1, seqlen)
        out_seq = seq
        out_end = end
    bias = tl.zeros((BLOCK_D,), tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    weights = ()  # type: Any
    dweights = ()  # type: Any
    for k in tl.static_range(WIDTH):
        weights += (tl.load(weight_ptr + offs_d * WIDTH + k, mask=mask_d, other=0.0).to(tl.float32),)
        dweights += (tl.zeros((BLOCK_D,), tl.float32),)
    dbias = tl.zeros((BLOCK_D,), tl.float32)
    window = ()  # type: Any
    slopes = ()  # type: Any
    for k in tl.static_range(FRONT):
        t = first + k - FRONT
        inside = (t >= 0) & (t < seqlen)
        tap = tl.load(x_base + t.to(tl.int64) * stride_x_t, mask=_live(mask_d, offs_d, inside), other=0.0)
        tap = tap.to(tl.float32)
        if initial_ptr is not None and not VARLEN:
            cell = (pid_b * channels + offs_d) * FRONT + (t + FRONT)
            tap += tl.load(initial_ptr + cell, mask=_live(mask_d, offs_d, t < 0), other=0.0).to(tl.float32)
        window += (tap,)
        slopes += (tl.zeros((BLOCK_D,), tl.float32),)
    row = sums_ptr + ((pid_b * tl.num_programs(1) + pid_t) * channels + offs_d) * (WIDTH + 1)
    # Its own tokens; then those after them that its inputs reach.
    for part in tl.static_range(2):
        for i in range(TILES if part == 0 else 1):
            rows = window
            gradients = ()  # type: Any
            for j in tl.static_range(ROWS if part == 0 else FRONT):
                t = first + i * ROWS + part * (TILES * ROWS) + j
                live = _live(mask_d, offs_d, t < seqlen)
                rows += (tl.load(x_base + t.to(tl.int64) * stride_x_t, mask=live, other=0.0).to(tl.float32),)
                gradient = tl.zeros((BLOCK_D,), tl.float32)
                if dy_ptr is not None:
                    gradient = tl.load(dy_base + t.to(tl.int64) * channels, mask=live, other=0.0).to(tl.float32)
                gradients += (gradient,)
            for j in tl.static_range(ROWS if part == 0 else FRONT):
                t = first + i * ROWS + part * (TILES * ROWS) + j
                if VARLEN:
                    while (t >= end) & (seq < nseqs - 1):
                        seq += 1
                        begin = _offset(cu_seqlens_ptr, seq, seqlen)
                        end = _offset(cu_seqlens_ptr, seq + 1, seqlen)
                taps = ()  # type: Any
                for k in tl.static_range(WIDTH):
                    tap = rows[j + k]
                    if VARLEN and k < FRONT:
                        place = t - begin + k  # in initial state and inputs of the sequence, one after the other
                        tap = tl.where(place >= FRONT, tap, 0.0)
                        if initial_ptr is not None:
                            cell = (seq.to(tl.int64) * channels + offs_d) * FRONT + place
                            early = _live(mask_d, offs_d, (place >= 0) & (place < FRONT) & (t < seqlen))
                            tap += tl.load(initial_ptr + cell, mask=early, other=0.0).to(tl.float32)
                    taps += (tap,)
                slope = gradients[j]
                if SILU:
                    sum = bias
                    for k in tl.static_range(WIDTH):
                        sum += taps[k] * weights[k]
                    slope *= _silu_slope(sum)
                slopes += (slope,)
                # A token after the end has no gradient, but its taps may hold inputs that are not finite.
                if (part == 0) & (t < seqlen):
                    dbias += slope
                    summed = ()  # type: Any
                    for k in tl.static_range(WIDTH):
                        summed += (dweights[k] + slope * taps[k],)
                    dweights = summed
                # Now all that reaches the input WIDTH - 1 tokens before is known.
                s = t - FRONT
                if VARLEN:
                    while (s >= out_end) & (out_seq < nseqs - 1):
                        out_seq += 1
                        out_end = _offset(cu_seqlens_ptr, out_seq + 1, seqlen)
                dx = tl.zeros((BLOCK_D,), tl.float32)
                for k in tl.static_range(WIDTH):
                    reached = slopes[j + FRONT - k] * weights[k]
                    if VARLEN:
                        reached = tl.where(t - k < out_end, reached, 0.0)
                    dx += reached
                written = _live(mask_d, offs_d, (s >= first) & (s < seqlen - (0 if VARLEN else FRONT)))
                if VARLEN and dfinal_ptr is not None:
                    place = s - out_end + FRONT
                    cell = ((pid_b + out_seq) * channels + offs_d) * FRONT + place
                    held = written & _live(mask_d, offs_d, (place >= 0) & (place < FRONT))
                    dx += tl.load(dfinal_ptr + cell, mask=held, other=0.0).to(tl.float32)
                tl.store(dx_base + s.to(tl.int64) * channels, dx.to(dx_ptr.dtype.element_ty), mask=written)
            window = rows[ROWS if part == 0 else FRONT :]
            slopes = slopes[ROWS if part == 0 else FRONT :]
    for k in tl.static_range(WIDTH):
        tl.store(row + k, dweights[k], mask=mask_d)
    tl.store(row + WIDTH, dbias, mask=mask_d)
    # The last WIDTH - 1 tokens by themselves: fewer tokens follow them, and nothing may be multiplied by the weights of
    # those that do not exist, which may be infinite.
    if not VARLEN and pid_t == tl.num_programs(1) - 1:
        late_slopes = ()  # type: Any
        for e in tl.static_range(FRONT):
            t = seqlen - FRONT + e
            live = _live(mask_d, offs_d, t >= 0)
            slope = tl.zeros((BLOCK_D,), tl.float32)
            if dy_ptr is not None:
                slope = tl.load(dy_base + t.to(tl.int64) * channels, mask=live, other=0.0).to(tl.float32)
            if SILU:
                sum = bias
                for k in tl.static_range(WIDTH):
                    s = t + k - FRONT
                    held = live & _live(mask_d, offs_d, s >= 0)
                    tap = tl.load(x_base + s.to(tl.int64) * stride_x_t, mask=held, other=0.0).to(tl.float32)
                    if initial_ptr is not None:
                        cell = (pid_b * channels + offs_d) * FRONT + (t + k)
                        early = live & _live(mask_d, offs_d, s < 0)
                        tap += tl.load(initial_ptr + cell, mask=early, other=0.0).to(tl.float32)
                    sum += tap * weights[k]
                slope *= _silu_slope(sum)
            late_slopes += (slope,)
        for e in tl.static_range(FRONT):
            t = seqlen - FRONT + e
            live = _live(mask_d, offs_d, t >= 0)
            dx = tl.zeros((BLOCK_D,), tl.float32)
            for k in tl.static_range(FRONT - e):
                dx += late_slopes[e + k] * weights[FRONT - k]
            if dfinal_ptr is not None:
                cell = (pid_b * channels + offs_d) * FRONT + e
                dx += tl.load(dfinal_ptr + cell, mask=live, other=0.0).to(tl.float32)
            tl.store(dx_base + t.to(tl.int64) * channels, dx.to(dx_ptr.dtype.element_ty), mask=live)
    if dinitial_ptr is not None:
        for s in range(pid_t, nseqs if VARLEN else 1, tl.num_programs(1)):
            origin = 0
            length = seqlen
            if VARLEN:
                origin = _offset(cu_seqlens_ptr, s, seqlen)
                length = tl.maximum(_offset(cu_seqlens_ptr, s + 1, seqlen) - origin, 0)
            cells = ((pid_b + s) * channels + offs_d) * FRONT
            early_slopes = ()  # type: Any
            for e in tl.static_range(FRONT):
                live = _live(mask_d, offs_d, e < length)
                slope = tl.zeros((BLOCK_D,), tl.float32)
                if dy_ptr is not None:
                    place = dy_base + (origin + e).to(tl.int64) * channels
                    slope = tl.load(place, mask=live, other=0.0).to(tl.float32)
                if SILU:
                    sum = bias
                    for k in tl.static_range(WIDTH):
                        if e + k >= FRONT:
                            source = (origin + (e + k - FRONT)).to(tl.int64) * stride_x_t
                            tap = tl.load(x_base + source, mask=live, other=0.0).to(tl.float32)
                        else:
                            tap = tl.load(initial_ptr + cells + e + k, mask=mask_d, other=0.0).to(tl.float32)
                        sum += tap * weights[k]
                    slope *= _silu_slope(sum)
                early_slopes += (tl.where(live, slope, 0.0),)
            for e in tl.static_range(FRONT):
                dinitial = tl.zeros((BLOCK_D,), tl.float32)
                for k in tl.static_range(e + 1):
                    dinitial += early_slopes[e - k] * weights[k]
                if dfinal_ptr is not None:
                    kept = _live(mask_d, offs_d, e >= length)
                    dinitial += tl.load(dfinal_ptr + cells + e - length, mask=kept, other=0.0).to(tl.float32)
                tl.store(dinitial_ptr + cells + e, dinitial.to(dinitial_ptr.dtype.element_ty), mask=mask_d)


@triton.jit
def _causal_conv1d_step_kernel(
    x_ptr, weight_ptr, bias_ptr, state_ptr, new_state_ptr, y_ptr, ntokens, channels, stride_x_b, stride_x_t,
    WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_D: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of channels, batch): a program owns BLOCK_D channels and their windows, for all tokens.

    Every read of a window is over before its first write, so that the state may be overwritten. Float32 sums.
    """
    offs_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    pid_b = tl.program_id(1).to(tl.int64)
    mask_d = offs_d < channels
    offs_w = tl.arange(0, BLOCK_W)
    x_base = x_ptr + pid_b * stride_x_b
    cells = (pid_b * channels + offs_d) * (WIDTH - 1)
    for t in range(ntokens):
        y = tl.zeros((BLOCK_D,), tl.float32)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
        for j in tl.static_range(WIDTH):
            place = t + j
            fresh = place + tl.zeros((BLOCK_D,), tl.int32) >= WIDTH - 1
            tap = tl.load(x_base + (place - (WIDTH - 1)) * stride_x_t + offs_d, mask=mask_d & fresh, other=0.0)
            old = tl.load(state_ptr + cells + place, mask=mask_d & (fresh == 0), other=0.0)
            weight = tl.load(weight_ptr + offs_d * WIDTH + j, mask=mask_d, other=0.0).to(tl.float32)
            y += (tap.to(tl.float32) + old.to(tl.float32)) * weight
        if SILU:
            y = silu(y)
        tl.store(y_ptr + (pid_b * ntokens + t) * channels + offs_d, y.to(y_ptr.dtype.element_ty), mask=mask_d)
    place = ntokens + offs_w
    live = mask_d[:, None] & (offs_w < WIDTH - 1)[None, :]
    new = tl.load(x_base + (place - (WIDTH - 1))[None, :] * stride_x_t + offs_d[:, None],
                  mask=live & (place >= WIDTH - 1)[None, :], other=0.0).to(tl.float32)  # fmt: skip
    new += tl.load(state_ptr + cells[:, None] + place[None, :], mask=live & (place < WIDTH - 1)[None, :],
                   other=0.0).to(tl.float32)  # fmt: skip
    tl.debug_barrier()
    tl.store(new_state_ptr + cells[:, None] + offs_w[None, :], new.to(new_state_ptr.dtype.element_ty), mask=live)


@planned(SPEC, x=last_contiguous, weight=contiguous, bias=contiguous, initial_state=contiguous, cu_seqlens=contiguous)
def causal_conv1d(
    *, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None, activation: str | None,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:  # fmt: skip
    """Plan `refold.ops.causal_conv1d`."""
    batch, seqlen, channels = x.shape
    width = weight.shape[1]
    nseqs = batch if cu_seqlens is None else cu_seqlens.numel() - 1
    blocks_d = triton.cdiv(channels, BLOCK_D)
    tiles = max(2, triton.cdiv(seqlen, ROWS * 65535))  # a grid has at most 65535 blocks along its second axis
    consts = {
        "WIDTH": width, "BLOCK_W": triton.next_power_of_2(max(1, width - 1)), "ROWS": ROWS, "TILES": tiles,
        "BLOCK_D": BLOCK_D, "SILU": activation == "silu", "VARLEN": cu_seqlens is not None,
    }  # fmt: skip
    grid = (blocks_d, triton.cdiv(seqlen, tiles * ROWS), batch)
    launch = Launch(_causal_conv1d_fwd_kernel, grid, consts, {"num_warps": 1})
    ints = (seqlen, channels, nseqs, *x.stride()[:2])
    new_y = fresh_like(x)
    new_final = fresh((nseqs, channels, width - 1), x.dtype, x.device)

    def run(x, weight, bias, initial_state, cu_seqlens):
        y, final = new_y(), new_final()
        launch(current_stream(x.device), cu_seqlens, x, weight, bias, initial_state, y, final, *ints)
        return y, final

    return run


@planned(
    SPEC,
    backward=True,
    dy=contiguous,
    dstate=contiguous,
    x=last_contiguous,
    weight=contiguous,
    bias=contiguous,
    initial_state=contiguous,
    cu_seqlens=contiguous,
)
def causal_conv1d_backward(
    *, dy: torch.Tensor | None, dstate: torch.Tensor | None, needs: frozenset[str], x: torch.Tensor,
    weight: torch.Tensor, bias: torch.Tensor | None, initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None, activation: str | None,
) -> Callable[..., dict[str, torch.Tensor]]:  # fmt: skip
    """Plan the gradients of all array arguments that are present, whatever ``needs`` says."""
    batch, seqlen, channels = x.shape
    width = weight.shape[1]
    nseqs = batch if cu_seqlens is None else cu_seqlens.numel() - 1
    # Long enough that rows of the weight's gradient weigh little, short enough to fill the device.
    blocks_d = triton.cdiv(channels, BACKWARD_BLOCK_D)
    most = triton.cdiv(blocks_d * batch * seqlen, device_limits(x.device)[0] * BACKWARD_PROGRAMS * BACKWARD_ROWS)
    tiles = max(triton.cdiv(seqlen, BACKWARD_ROWS * 65535), min(most, BACKWARD_TILES))
    consts = {
        "WIDTH": width, "ROWS": BACKWARD_ROWS, "TILES": tiles, "BLOCK_D": BACKWARD_BLOCK_D,
        "SILU": activation == "silu", "VARLEN": cu_seqlens is not None,
    }  # fmt: skip
    grid = (blocks_d, triton.cdiv(seqlen, tiles * BACKWARD_ROWS), batch)
    # Without a limit, the last tokens cost registers in all programs, and fewer of these are resident.
    options = {"num_warps": 1} | ({"maxnreg": 64} if width <= 4 and not INTERPRETED else {})
    launch = Launch(_causal_conv1d_bwd_kernel, grid, consts, options)
    ints = (seqlen, channels, nseqs, *x.stride()[:2])
    sums = RowSums(grid[1] * batch, (channels, width + 1), torch.float32, x.device)
    new_dx, new_dinitial = fresh_like(x), None if initial_state is None else fresh_like(initial_state)

    def run(dy, dstate, x, weight, bias, initial_state, cu_seqlens):
        stream, rows = current_stream(x.device), sums.rows()
        found = {"x": new_dx()}
        if new_dinitial is not None:
            found["initial_state"] = new_dinitial()
        launch(
            stream, cu_seqlens, x, weight, bias, initial_state, dy, dstate, found["x"], found.get("initial_state"),
            rows, *ints,
        )  # fmt: skip
        total = sums(stream, rows)
        found["weight"] = total[:, :width]
        if bias is not None:
            found["bias"] = total[:, width]
        return found

    return run


def _plan_step(
    *, x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> Callable[..., torch.Tensor]:
    """Return a function of the arrays and the new state, which may be the state, that returns y."""
    batch, channels, _ = state.shape
    width = weight.shape[1]
    one = x.dim() == 2
    consts: dict[str, Any] = {
        "WIDTH": width, "BLOCK_W": triton.next_power_of_2(max(1, width - 1)), "BLOCK_D": 256,
        "SILU": activation == "silu",
    }  # fmt: skip
    launch = Launch(_causal_conv1d_step_kernel, (triton.cdiv(channels, 256), batch), consts, {"num_warps": 4})
    ints = (1 if one else x.shape[1], channels, x.stride(0), 0 if one else x.stride(1))
    new_y = fresh_like(x)

    def run(x, weight, state, bias, new_state):
        y = new_y()
        launch(current_stream(x.device), x, weight, bias, state, new_state, y, *ints)
        return y

    return run


causal_conv1d_step, causal_conv1d_step_, _ = planned_steps(
    STEP, _plan_step, x=last_contiguous, weight=contiguous, bias=contiguous
)
