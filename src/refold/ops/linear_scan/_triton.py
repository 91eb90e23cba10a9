"""Elementwise linear recurrence on GPUs with Triton: a thread a channel, time cut where channels are few."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from refold.ops.linear_scan.spec import SPEC
from refold.ops.spec import Meta
from refold.ops.torch.launch import Launch, contiguous, current_stream, fresh, fresh_like, planned, refusal
from refold.ops.torch.tables import device_limits

UNROLL = 8


def supports(meta: Meta) -> str | None:
    """Return None if the kernel takes these arguments, else why not."""
    return refusal(meta)


@triton.jit
def _linear_scan_fwd_kernel(
    cu_seqlens_ptr, a_ptr, x_ptr, initial_ptr, segment_state_ptr, segment_factor_ptr, h_ptr, final_ptr,
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
    row = pid_k * nsegments * channels
    if not LOCAL:
        if initial_ptr is not None:
            state = tl.load(initial_ptr + pid_k * channels + offs, mask=mask, other=0.0).to(tl.float32)
        for s in range(pid_s):
            before = row + s * channels + offs
            own = tl.load(segment_state_ptr + before, mask=mask, other=0.0)
            state = state * tl.load(segment_factor_ptr + before, mask=mask, other=0.0) + own
    end = tl.minimum((pid_s + 1) * segment, length)
    for t0 in range(pid_s * segment, end, UNROLL):
        for i in tl.static_range(UNROLL):
            t = t0 + i
            live = mask & (t + tl.zeros((BLOCK,), tl.int32) < end)
            place = begin + (length - 1 - t if REVERSE else t)
            a = tl.load(a_ptr + place * channels + offs, mask=live, other=1.0).to(tl.float32)
            x = tl.load(x_ptr + place * channels + offs, mask=live, other=0.0).to(tl.float32)
            state = a * state + x
            if LOCAL:
                factor *= a
            else:
                tl.store(h_ptr + place * channels + offs, state.to(h_ptr.dtype.element_ty), mask=live)
    if LOCAL:
        tl.store(segment_state_ptr + row + pid_s * channels + offs, state, mask=mask)
        tl.store(segment_factor_ptr + row + pid_s * channels + offs, factor, mask=mask)
    elif pid_s == nsegments - 1:
        tl.store(final_ptr + pid_k * channels + offs, state.to(final_ptr.dtype.element_ty), mask=mask)


@planned(SPEC, a=contiguous, x=contiguous, initial_state=contiguous, cu_seqlens=contiguous)
def linear_scan(
    *, a: torch.Tensor, x: torch.Tensor, initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
    reverse: bool,
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

    def run(a, x, initial_state, cu_seqlens):
        h, final, stream = new_h(), new_final(), current_stream(x.device)
        states = factors = final  # never read where there is one segment
        if local is not None:
            states, factors = new_rows(), new_rows()
            local(stream, cu_seqlens, a, x, initial_state, states, factors, h, final, *ints)
        scan(stream, cu_seqlens, a, x, initial_state, states, factors, h, final, *ints)
        return h, final

    return run
