"""Elementwise linear recurrence on GPUs with Triton: a thread a channel, time cut where channels are few."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any  # noqa: F401 - in type comments

import torch
import triton
import triton.language as tl

from refold.ops.linear_scan.spec import SPEC
from refold.ops.spec import Meta
from refold.ops.torch.launch import (
    Launch,
    contiguous,
    current_stream,
    fresh,
    fresh_like,
    planned,
    refusal,
)
from refold.ops.torch.tables import device_limits

UNROLL = 8
# Of the backward: tokens from border to border; channels and warps a program; programs a multiprocessor that fill it.
TOKENS, BLOCK, WARPS, SLOTS = 8, 128, 1, 32


def supports(meta: Meta) -> str | None:
    """Return None if the kernel takes these arguments, else why not."""
    return refusal(meta)


@triton.jit
def _linear_scan_fwd_kernel(
    cu_seqlens_ptr, reset_ptr, a_ptr, x_ptr, initial_ptr, segment_state_ptr, segment_factor_ptr, segment_reset_ptr,
    h_ptr, final_ptr,
    seqlen, segment, nsegments, channels,
    BLOCK: tl.constexpr, UNROLL: tl.constexpr, REVERSE: tl.constexpr, LOCAL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of channels, segments, sequences): a program owns BLOCK channels of one segment.

    LOCAL writes the segment's own state and product of factors; else h and the final state. Reads its inputs once.
    """
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pid_s = tl.program_id(1)
    pid_k = tl.program_id(2).to(tl.int64)
    mask = offs < channels
    begin = pid_k * seqlen
    length = seqlen
    if cu_seqlens_ptr is not None:
        # Wrong offsets must not lead out of the arrays.
        begin = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + pid_k).to(tl.int64), 0), seqlen)
        end = tl.minimum(tl.load(cu_seqlens_ptr + pid_k + 1).to(tl.int64), seqlen)
        length = tl.maximum(end - begin, 0).to(tl.int32)
    state = tl.zeros((BLOCK,), tl.float32)
    factor = tl.zeros((BLOCK,), tl.float32) + 1.0
    forgotten = tl.zeros((BLOCK,), tl.float32)
    row = pid_k * nsegments * channels
    if not LOCAL:
        if initial_ptr is not None:
            state = tl.load(initial_ptr + pid_k * channels + offs, mask=mask, other=0.0).to(tl.float32)
        for s in range(pid_s):
            before = row + s * channels + offs
            own = tl.load(segment_state_ptr + before, mask=mask, other=0.0)
            state = state * tl.load(segment_factor_ptr + before, mask=mask, other=0.0)
            if reset_ptr is not None:
                state = tl.where(tl.load(segment_reset_ptr + before, mask=mask, other=0.0) > 0, 0.0, state)
            state += own
    end = tl.minimum((pid_s + 1) * segment, length)
    for t0 in range(pid_s * segment, end, UNROLL):
        for i in tl.static_range(UNROLL):
            t = t0 + i
            live = mask & (t + tl.zeros((BLOCK,), tl.int32) < end)
            place = begin + (length - 1 - t if REVERSE else t)
            a = tl.load(a_ptr + place * channels + offs, mask=live, other=1.0).to(tl.float32)
            x = tl.load(x_ptr + place * channels + offs, mask=live, other=0.0).to(tl.float32)
            state = a * state
            if reset_ptr is not None:
                gone = tl.load(reset_ptr + place * channels + offs, mask=live, other=0) > 0
                state = tl.where(gone, 0.0, state)
                if LOCAL:
                    forgotten = tl.where(gone, 1.0, forgotten)
            state += x
            if LOCAL:
                factor *= a
            else:
                tl.store(h_ptr + place * channels + offs, state.to(h_ptr.dtype.element_ty), mask=live)
    if LOCAL:
        tl.store(segment_state_ptr + row + pid_s * channels + offs, state, mask=mask)
        tl.store(segment_factor_ptr + row + pid_s * channels + offs, factor, mask=mask)
        if reset_ptr is not None:
            tl.store(segment_reset_ptr + row + pid_s * channels + offs, forgotten, mask=mask)
    elif pid_s == nsegments - 1:
        tl.store(final_ptr + pid_k * channels + offs, state.to(final_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _span(cu_seqlens_ptr, sequence, seqlen):
    """Return the first token and the length of a sequence; wrong offsets must not lead out of the arrays."""
    begin = sequence * seqlen
    length = seqlen
    if cu_seqlens_ptr is not None:
        begin = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + sequence).to(tl.int64), 0), seqlen)
        end = tl.minimum(tl.load(cu_seqlens_ptr + sequence + 1).to(tl.int64), seqlen)
        length = tl.maximum(end - begin, 0).to(tl.int32)
    return begin, length


@triton.jit
def _linear_scan_bwd_segments_kernel(
    reset_ptr, a_ptr, x_ptr, dh_ptr, state_ptr, adjoint_ptr, factor_ptr, gone_ptr, seqlen, segment, nsegments, channels,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of channels, segments, batch): of a segment its own state, its factor, its adjoint at its begin.

    The last is the sum of dh[t] times the product of factors up to t, so that one walk gives all three.
    """
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pid_s = tl.program_id(1)
    pid_b = tl.program_id(2).to(tl.int64)
    mask = offs < channels
    state = tl.zeros((BLOCK,), tl.float32)
    adjoint = tl.zeros((BLOCK,), tl.float32)
    factor = tl.zeros((BLOCK,), tl.float32) + 1.0
    forgotten = tl.zeros((BLOCK,), tl.float32)
    end = tl.minimum((pid_s + 1) * segment, seqlen)
    for first in range(pid_s * segment, end, TOKENS):
        for i in tl.static_range(TOKENS):
            t = first + i
            live = mask & (t + tl.zeros((BLOCK,), tl.int32) < end)
            place = (pid_b * seqlen + (seqlen - 1 - t if REVERSE else t)) * channels + offs
            a = tl.load(a_ptr + place, mask=live, other=1.0).to(tl.float32)
            state = a * state
            factor *= a
            if reset_ptr is not None:
                gone = tl.load(reset_ptr + place, mask=live, other=0) > 0
                state = tl.where(gone, 0.0, state)
                forgotten = tl.where(gone, 1.0, forgotten)
            state += tl.load(x_ptr + place, mask=live, other=0.0).to(tl.float32)
            if dh_ptr is not None:
                share = factor * tl.load(dh_ptr + place, mask=live, other=0.0).to(tl.float32)
                if reset_ptr is not None:
                    share = tl.where(forgotten > 0, 0.0, share)
                adjoint += share
    cell = (pid_b * nsegments + pid_s) * channels + offs
    tl.store(state_ptr + cell, state, mask=mask)
    tl.store(adjoint_ptr + cell, adjoint, mask=mask)
    tl.store(factor_ptr + cell, factor, mask=mask)
    if reset_ptr is not None:
        tl.store(gone_ptr + cell, forgotten, mask=mask)


@triton.jit
def _linear_scan_bwd_kernel(
    cu_seqlens_ptr, reset_ptr, a_ptr, x_ptr, initial_ptr, dh_ptr, dfinal_ptr, segment_state_ptr, segment_adjoint_ptr,
    segment_factor_ptr, segment_reset_ptr, border_ptr, da_ptr, dx_ptr, dinitial_ptr,
    seqlen, segment, nsegments, channels,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of channels, segments, sequences): a program owns BLOCK channels of one segment.

    It walks with the scan and keeps the state at every border between TOKENS tokens; then it goes back from border to
    border, forms the states between them again and follows the adjoints λ[t] = dh[t] + a[t+1] λ[t+1].
    """
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pid_s = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    mask = offs < channels
    origin, length = _span(cu_seqlens_ptr, sequence, seqlen)
    begin = pid_s * segment
    end = tl.minimum(begin + segment, length)
    count = tl.cdiv(tl.maximum(end - begin, 0), TOKENS)
    if cu_seqlens_ptr is None:
        borders = sequence * tl.cdiv(seqlen, TOKENS) + begin // TOKENS
    else:
        borders = sequence + origin // TOKENS
    segments = sequence * nsegments * channels + offs
    state = tl.zeros((BLOCK,), tl.float32)
    if initial_ptr is not None:
        state = tl.load(initial_ptr + sequence * channels + offs, mask=mask, other=0.0).to(tl.float32)
    for s in range(pid_s):
        at = segments + s * channels
        own = tl.load(segment_state_ptr + at, mask=mask, other=0.0)
        state = state * tl.load(segment_factor_ptr + at, mask=mask, other=0.0)
        if reset_ptr is not None:
            state = tl.where(tl.load(segment_reset_ptr + at, mask=mask, other=0.0) > 0, 0.0, state)
        state += own
    for j in range(count):
        tl.store(border_ptr + (borders + j) * channels + offs, state, mask=mask)
        for i in tl.static_range(TOKENS):
            t = begin + j * TOKENS + i
            live = mask & (t + tl.zeros((BLOCK,), tl.int32) < end)
            place = (origin + (length - 1 - t if REVERSE else t)) * channels + offs
            a = tl.load(a_ptr + place, mask=live, other=1.0).to(tl.float32)
            state = a * state
            if reset_ptr is not None:
                state = tl.where(tl.load(reset_ptr + place, mask=live, other=0) > 0, 0.0, state)
            state += tl.load(x_ptr + place, mask=live, other=0.0).to(tl.float32)
    tl.debug_barrier()  # Other threads may read what these wrote.
    carried = tl.zeros((BLOCK,), tl.float32)  # a[t+1] λ[t+1], or the gradient of the final state
    if dfinal_ptr is not None:
        carried = tl.load(dfinal_ptr + sequence * channels + offs, mask=mask, other=0.0).to(tl.float32)
    for s in range(nsegments - 1 - pid_s):
        at = segments + (nsegments - 1 - s) * channels
        own = tl.load(segment_adjoint_ptr + at, mask=mask, other=0.0)
        carried = carried * tl.load(segment_factor_ptr + at, mask=mask, other=0.0)
        if reset_ptr is not None:
            carried = tl.where(tl.load(segment_reset_ptr + at, mask=mask, other=0.0) > 0, 0.0, carried)
        carried += own
    for back in range(count):
        first = begin + (count - 1 - back) * TOKENS
        state = tl.load(border_ptr + (borders + count - 1 - back) * channels + offs, mask=mask, other=0.0)
        befores = ()  # type: Any
        factors = ()  # type: Any
        resets = ()  # type: Any
        for i in tl.static_range(TOKENS):
            t = first + i
            live = mask & (t + tl.zeros((BLOCK,), tl.int32) < end)
            place = (origin + (length - 1 - t if REVERSE else t)) * channels + offs
            a = tl.load(a_ptr + place, mask=live, other=1.0).to(tl.float32)
            befores += (state,)
            factors += (a,)
            state = a * state
            if reset_ptr is not None:
                gone = tl.load(reset_ptr + place, mask=live, other=0) > 0
                resets += (gone,)
                state = tl.where(gone, 0.0, state)
            state += tl.load(x_ptr + place, mask=live, other=0.0).to(tl.float32)
        for k in tl.static_range(TOKENS - 1, -1, -1):
            t = first + k
            live = mask & (t + tl.zeros((BLOCK,), tl.int32) < end)
            place = (origin + (length - 1 - t if REVERSE else t)) * channels + offs
            adjoint = carried
            if dh_ptr is not None:
                adjoint += tl.load(dh_ptr + place, mask=live, other=0.0).to(tl.float32)
            tl.store(dx_ptr + place, adjoint.to(dx_ptr.dtype.element_ty), mask=live)
            grad = adjoint * befores[k]
            carried = factors[k] * adjoint
            if reset_ptr is not None:
                grad = tl.where(resets[k], 0.0, grad)
                carried = tl.where(resets[k], 0.0, carried)
            tl.store(da_ptr + place, grad.to(da_ptr.dtype.element_ty), mask=live)
    if dinitial_ptr is not None and pid_s == 0:
        place = dinitial_ptr + sequence * channels + offs
        tl.store(place, carried.to(dinitial_ptr.dtype.element_ty), mask=mask)


@planned(SPEC, a=contiguous, x=contiguous, initial_state=contiguous, cu_seqlens=contiguous, reset=contiguous)
def linear_scan(
    *, a: torch.Tensor, x: torch.Tensor, initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
    reset: torch.Tensor | None, reverse: bool,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:  # fmt: skip
    """Plan `refold.ops.linear_scan`."""
    batch, seqlen = x.shape[:2]
    channels = max(1, x[0, 0].numel())
    nseqs = batch if cu_seqlens is None else cu_seqlens.numel() - 1
    block, nsegments = 64, 1
    blocks = triton.cdiv(channels, block)
    slots = device_limits(x.device)[0] * 8
    if cu_seqlens is None and blocks * batch * 2 < slots:
        nsegments = max(1, min(slots // (blocks * batch), 64, seqlen // 64))
    segment = seqlen if nsegments == 1 else triton.cdiv(triton.cdiv(seqlen, nsegments), UNROLL) * UNROLL
    nsegments = triton.cdiv(seqlen, segment)
    consts = {"BLOCK": block, "UNROLL": UNROLL, "REVERSE": bool(reverse)}
    options = {"num_warps": 2}
    local = None
    if nsegments > 1:
        grid = (blocks, nsegments - 1, nseqs)
        local = Launch(_linear_scan_fwd_kernel, grid, {**consts, "LOCAL": True}, options)
    scan = Launch(_linear_scan_fwd_kernel, (blocks, nsegments, nseqs), {**consts, "LOCAL": False}, options)
    ints = (seqlen, segment, nsegments, channels)
    new_h = fresh_like(x)
    new_final = fresh((nseqs, *x.shape[2:]), torch.float32, x.device)
    new_rows = fresh((nseqs * nsegments * channels,), torch.float32, x.device)

    def run(a, x, initial_state, cu_seqlens, reset):
        h, final, stream = new_h(), new_final(), current_stream(x.device)
        states = factors = forgotten = final  # never read where there is one segment
        if local is not None:
            states, factors = new_rows(), new_rows()
            forgotten = states if reset is None else new_rows()
            local(stream, cu_seqlens, reset, a, x, initial_state, states, factors, forgotten, h, final, *ints)
        scan(stream, cu_seqlens, reset, a, x, initial_state, states, factors, forgotten, h, final, *ints)
        return h, final

    return run


@planned(
    SPEC,
    backward=True,
    dh=contiguous,
    dstate=contiguous,
    a=contiguous,
    x=contiguous,
    initial_state=contiguous,
    cu_seqlens=contiguous,
    reset=contiguous,
)
def linear_scan_backward(
    *, dh: torch.Tensor | None, dstate: torch.Tensor | None, needs: frozenset[str], a: torch.Tensor, x: torch.Tensor,
    initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None, reset: torch.Tensor | None, reverse: bool,
) -> Callable[..., dict[str, torch.Tensor]]:  # fmt: skip
    """Plan the gradients of all array arguments that are present, whatever ``needs`` says."""
    batch, seqlen = x.shape[:2]
    channels = max(1, x[0, 0].numel())
    nseqs = batch if cu_seqlens is None else cu_seqlens.numel() - 1
    blocks = triton.cdiv(channels, BLOCK)
    slots = device_limits(x.device)[0] * SLOTS
    nsegments = 1
    if cu_seqlens is None and blocks * batch * 2 < slots:
        nsegments = max(1, min(slots // (blocks * batch), 64, seqlen // 64))
    segment = triton.cdiv(triton.cdiv(seqlen, nsegments), TOKENS) * TOKENS
    nsegments = triton.cdiv(seqlen, segment)
    consts = {"BLOCK": BLOCK, "TOKENS": TOKENS, "REVERSE": bool(reverse)}
    options = {"num_warps": WARPS}
    local = None
    if nsegments > 1:
        local = Launch(_linear_scan_bwd_segments_kernel, (blocks, nsegments, batch), consts, options)
    main = Launch(_linear_scan_bwd_kernel, (blocks, nsegments, nseqs), consts, options)
    ints = (seqlen, segment, nsegments, channels)
    borders = batch * triton.cdiv(seqlen, TOKENS) + (0 if cu_seqlens is None else nseqs)
    new_borders = fresh((borders * channels,), torch.float32, x.device)
    new_segments = fresh((batch * nsegments * channels,), torch.float32, x.device)
    new_da, new_dx = fresh_like(a), fresh_like(x)
    new_dinitial = None if initial_state is None else fresh_like(initial_state)

    def run(dh, dstate, a, x, initial_state, cu_seqlens, reset):
        stream = current_stream(x.device)
        state = adjoint = factor = forgotten = border = new_borders()
        if local is not None:
            state, adjoint, factor = new_segments(), new_segments(), new_segments()
            forgotten = state if reset is None else new_segments()
            local(stream, reset, a, x, dh, state, adjoint, factor, forgotten, *ints)
        found = {"a": new_da(), "x": new_dx()}
        if new_dinitial is not None:
            found["initial_state"] = new_dinitial()
        main(
            stream, cu_seqlens, reset, a, x, initial_state, dh, dstate, state, adjoint, factor, forgotten, border,
            found["a"], found["x"], found.get("initial_state"), *ints,
        )  # fmt: skip
        return found

    return run
