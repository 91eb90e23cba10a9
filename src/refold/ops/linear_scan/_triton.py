"""The elementwise linear recurrence on GPUs with Triton: one thread per channel. With few channels, time is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from refold.ops.linear_scan.spec import SPEC
from refold.ops.torch.launch import Launch, current_stream, planned, refusal
from refold.ops.torch.plans import contiguous, fresh, fresh_like
from refold.ops.torch.tables import device_limits

# Channels and warps of a program; tokens that are loaded at a time (`_rows` counts on 16), from border to border in the
# backward; programs a multiprocessor from which time is not cut.
BLOCK, WARPS, TOKENS, SLOTS = 128, 1, 16, 2

supports = refusal


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
def _place(origin, length, t, channels, offs, REVERSE: tl.constexpr):
    """Return the position of token ``t`` in the direction of the scan."""
    return (origin + (length - 1 - t if REVERSE else t)) * channels + offs


@triton.jit
def _channels(channels, BLOCK: tl.constexpr):
    """Return the channels of a program, and which of them exist.

    The hint keeps loads of 16-bit values from being wider than a thread's share of a token: each of the 32 threads
    owns all tokens of its channels.
    """
    offs = tl.max_contiguous(tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), BLOCK // 32)
    return offs, offs < channels


@triton.jit
def _tokens(
    ptr, origin, length, first, begin, end, channels, offs, mask, other, TOKENS: tl.constexpr, REVERSE: tl.constexpr
):
    """Load a tile of TOKENS tokens of a walk from ``first`` on; those not from ``begin`` to ``end`` are ``other``.

    All at once, before anything is computed or stored: what is loaded after a store waits for it to be computed. And as
    one operation, because Triton needs seconds to choose layouts for some hundred loads.
    """
    t = first + tl.arange(0, TOKENS)[:, None]
    live = mask[None, :] & (t < tl.where(first < begin, first, end))  # first is whole tiles away from begin
    return tl.load(ptr + _place(origin, length, t, channels, offs[None, :], REVERSE), mask=live, other=other)


@triton.jit
def _rows(tile, BLOCK: tl.constexpr):
    """Return the 16 tokens of a tile, one by one. This moves nothing between threads."""
    return _parts(tile.reshape(2, 2, 2, 2, BLOCK).permute(4, 3, 2, 1, 0))


@triton.jit
def _parts(tile):
    """Return the vectors of an array in which all other axes have two places, the last axis first."""
    if len(tile.shape) == 1:
        return (tile,)
    else:
        early, late = tl.split(tile)
        return _parts(early) + _parts(late)


@triton.jit
def _linear_scan_segments_kernel(
    reset_ptr, a_ptr, x_ptr, dh_ptr, state_ptr, factor_ptr, gone_ptr, adjoint_ptr, seqlen, segment, nsegments, channels,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of channels, segments, batch): of a segment its own state, its factor, its adjoint at its begin.

    The last is the sum of dh[t] times the product of factors up to t, so that one walk gives all three.
    """
    offs, mask = _channels(channels, BLOCK)
    pid_s = tl.program_id(1)
    pid_b = tl.program_id(2).to(tl.int64)
    state = tl.zeros((BLOCK,), tl.float32)
    adjoint = tl.zeros((BLOCK,), tl.float32)
    factor = tl.zeros((BLOCK,), tl.float32) + 1.0
    forgotten = tl.zeros((BLOCK,), tl.float32)
    origin, begin = pid_b * seqlen, pid_s * segment
    end = tl.minimum(begin + segment, seqlen)
    for first in range(begin, end, TOKENS):
        next_a = _tokens(a_ptr, origin, seqlen, first, begin, end, channels, offs, mask, 1.0, TOKENS, REVERSE)
        next_x = _tokens(x_ptr, origin, seqlen, first, begin, end, channels, offs, mask, 0.0, TOKENS, REVERSE)
        aa, xx = _rows(next_a, BLOCK), _rows(next_x, BLOCK)
        if dh_ptr is not None:
            next_dh = _tokens(dh_ptr, origin, seqlen, first, begin, end, channels, offs, mask, 0.0, TOKENS, REVERSE)
            dhs = _rows(next_dh, BLOCK)
        if reset_ptr is not None:
            next_r = _tokens(reset_ptr, origin, seqlen, first, begin, end, channels, offs, mask, 0, TOKENS, REVERSE)
            rr = _rows(next_r, BLOCK)
        for i in tl.static_range(TOKENS):
            a = aa[i].to(tl.float32)
            state = a * state
            factor *= a
            if reset_ptr is not None:
                state = tl.where(rr[i] > 0, 0.0, state)
                forgotten = tl.where(rr[i] > 0, 1.0, forgotten)
            state += xx[i].to(tl.float32)
            if dh_ptr is not None:
                share = factor * dhs[i].to(tl.float32)
                if reset_ptr is not None:
                    share = tl.where(forgotten > 0, 0.0, share)
                adjoint += share
    cell = (pid_b * nsegments + pid_s) * channels + offs
    tl.store(state_ptr + cell, state, mask=mask)
    tl.store(factor_ptr + cell, factor, mask=mask)
    if reset_ptr is not None:
        tl.store(gone_ptr + cell, forgotten, mask=mask)
    if adjoint_ptr is not None:
        tl.store(adjoint_ptr + cell, adjoint, mask=mask)


@triton.jit
def _past(state, cell, reset_ptr, own_ptr, factor_ptr, gone_ptr, mask):
    """Pass the state before a segment through it, or the adjoint after it."""
    state *= tl.load(factor_ptr + cell, mask=mask, other=0.0)
    if reset_ptr is not None:
        state = tl.where(tl.load(gone_ptr + cell, mask=mask, other=0.0) > 0, 0.0, state)
    return state + tl.load(own_ptr + cell, mask=mask, other=0.0)


@triton.jit
def _step(state, a, x, reset, RESETS: tl.constexpr):
    """Return the state after a token."""
    state = a.to(tl.float32) * state
    if RESETS:
        state = tl.where(reset > 0, 0.0, state)
    return state + x.to(tl.float32)


@triton.jit
def _state_before(
    initial_ptr, reset_ptr, state_ptr, factor_ptr, gone_ptr, sequence, pid_s, nsegments, channels, offs, mask
):
    """Return the state before a segment, from those of the segments before it."""
    state = offs * 0.0
    if initial_ptr is not None:
        state = tl.load(initial_ptr + sequence * channels + offs, mask=mask, other=0.0).to(tl.float32)
    for s in range(pid_s):
        cell = (sequence * nsegments + s) * channels + offs
        state = _past(state, cell, reset_ptr, state_ptr, factor_ptr, gone_ptr, mask)
    return state


@triton.jit
def _linear_scan_fwd_kernel(
    cu_seqlens_ptr, reset_ptr, a_ptr, x_ptr, initial_ptr, segment_state_ptr, segment_factor_ptr, segment_reset_ptr,
    h_ptr, final_ptr,
    seqlen, segment, nsegments, channels,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of channels, segments, sequences): a program owns BLOCK channels of one segment.

    Reads its inputs once, and the next tokens while it walks over these.
    """
    offs, mask = _channels(channels, BLOCK)
    pid_s = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    origin, length = _span(cu_seqlens_ptr, sequence, seqlen)
    state = _state_before(
        initial_ptr, reset_ptr, segment_state_ptr, segment_factor_ptr, segment_reset_ptr,
        sequence, pid_s, nsegments, channels, offs, mask,
    )  # fmt: skip
    begin = pid_s * segment
    end = tl.minimum(begin + segment, length)
    next_a = _tokens(a_ptr, origin, length, begin, begin, end, channels, offs, mask, 1.0, TOKENS, REVERSE)
    next_x = _tokens(x_ptr, origin, length, begin, begin, end, channels, offs, mask, 0.0, TOKENS, REVERSE)
    next_r = next_x  # read where there are resets
    if reset_ptr is not None:
        next_r = _tokens(reset_ptr, origin, length, begin, begin, end, channels, offs, mask, 0, TOKENS, REVERSE)
    for first in range(begin, end, TOKENS):
        aa, xx, after = _rows(next_a, BLOCK), _rows(next_x, BLOCK), first + TOKENS
        next_a = _tokens(a_ptr, origin, length, after, begin, end, channels, offs, mask, 1.0, TOKENS, REVERSE)
        next_x = _tokens(x_ptr, origin, length, after, begin, end, channels, offs, mask, 0.0, TOKENS, REVERSE)
        rr, next_r = _rows(next_r, BLOCK), next_x
        if reset_ptr is not None:
            next_r = _tokens(reset_ptr, origin, length, after, begin, end, channels, offs, mask, 0, TOKENS, REVERSE)
        for i in tl.static_range(TOKENS):
            state = _step(state, aa[i], xx[i], rr[i], reset_ptr is not None)
            live = mask & ((offs * 0 + first + i) < end)
            place = h_ptr + _place(origin, length, first + i, channels, offs, REVERSE)
            tl.store(place, state.to(h_ptr.dtype.element_ty), mask=live)
    if pid_s == nsegments - 1:
        tl.store(final_ptr + sequence * channels + offs, state.to(final_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _linear_scan_bwd_kernel(
    cu_seqlens_ptr, reset_ptr, a_ptr, x_ptr, initial_ptr, dh_ptr, dfinal_ptr, segment_state_ptr, segment_factor_ptr,
    segment_reset_ptr, segment_adjoint_ptr, border_ptr, da_ptr, dx_ptr, dinitial_ptr,
    seqlen, segment, nsegments, channels,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of channels, segments, sequences): a program owns BLOCK channels of one segment.

    It goes with the scan and stores the state at every border between TOKENS tokens. Then it goes back from border to
    border, computes the states between them again, and follows the adjoints λ[t] = dh[t] + a[t+1] λ[t+1].
    """
    offs, mask = _channels(channels, BLOCK)
    pid_s = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    origin, length = _span(cu_seqlens_ptr, sequence, seqlen)
    begin = pid_s * segment
    end = tl.minimum(begin + segment, length)
    count = tl.cdiv(tl.maximum(end - begin, 0), TOKENS)
    if cu_seqlens_ptr is None:
        borders = sequence * tl.cdiv(seqlen, TOKENS) + begin // TOKENS
    else:
        borders = sequence + origin // TOKENS
    state = _state_before(
        initial_ptr, reset_ptr, segment_state_ptr, segment_factor_ptr, segment_reset_ptr,
        sequence, pid_s, nsegments, channels, offs, mask,
    )  # fmt: skip
    next_a = _tokens(a_ptr, origin, length, begin, begin, end, channels, offs, mask, 1.0, TOKENS, REVERSE)
    next_x = _tokens(x_ptr, origin, length, begin, begin, end, channels, offs, mask, 0.0, TOKENS, REVERSE)
    next_r = next_x  # read where there are resets
    if reset_ptr is not None:
        next_r = _tokens(reset_ptr, origin, length, begin, begin, end, channels, offs, mask, 0, TOKENS, REVERSE)
    for j in range(count):
        aa, xx, after = _rows(next_a, BLOCK), _rows(next_x, BLOCK), begin + (j + 1) * TOKENS
        next_a = _tokens(a_ptr, origin, length, after, begin, end, channels, offs, mask, 1.0, TOKENS, REVERSE)
        next_x = _tokens(x_ptr, origin, length, after, begin, end, channels, offs, mask, 0.0, TOKENS, REVERSE)
        rr, next_r = _rows(next_r, BLOCK), next_x
        if reset_ptr is not None:
            next_r = _tokens(reset_ptr, origin, length, after, begin, end, channels, offs, mask, 0, TOKENS, REVERSE)
        tl.store(border_ptr + (borders + j) * channels + offs, state, mask=mask)
        for i in tl.static_range(TOKENS):
            state = _step(state, aa[i], xx[i], rr[i], reset_ptr is not None)
    tl.debug_barrier()  # Other threads may read what these wrote.
    carried = offs * 0.0  # a[t+1] λ[t+1], or the gradient of the final state
    if dfinal_ptr is not None:
        carried = tl.load(dfinal_ptr + sequence * channels + offs, mask=mask, other=0.0).to(tl.float32)
    for s in range(nsegments - 1 - pid_s):
        cell = (sequence * nsegments + nsegments - 1 - s) * channels + offs
        carried = _past(carried, cell, reset_ptr, segment_adjoint_ptr, segment_factor_ptr, segment_reset_ptr, mask)
    first = begin + (count - 1) * TOKENS
    border = border_ptr + (borders + count - 1) * channels + offs
    next_state = tl.load(border, mask=mask & (offs * 0 + count > 0), other=0.0)
    next_a = _tokens(a_ptr, origin, length, first, begin, end, channels, offs, mask, 1.0, TOKENS, REVERSE)
    next_x = _tokens(x_ptr, origin, length, first, begin, end, channels, offs, mask, 0.0, TOKENS, REVERSE)
    next_r = next_x
    if reset_ptr is not None:
        next_r = _tokens(reset_ptr, origin, length, first, begin, end, channels, offs, mask, 0, TOKENS, REVERSE)
    if dh_ptr is not None:
        next_dh = _tokens(dh_ptr, origin, length, first, begin, end, channels, offs, mask, 0.0, TOKENS, REVERSE)
    for back in range(count):
        j = count - 1 - back
        first = begin + j * TOKENS
        before = first - TOKENS
        aa, xx, state = _rows(next_a, BLOCK), _rows(next_x, BLOCK), next_state
        if dh_ptr is not None:
            dhs = _rows(next_dh, BLOCK)
            next_dh = _tokens(dh_ptr, origin, length, before, begin, end, channels, offs, mask, 0.0, TOKENS, REVERSE)
        border -= channels
        next_state = tl.load(border, mask=mask & (offs * 0 + j > 0), other=0.0)
        next_a = _tokens(a_ptr, origin, length, before, begin, end, channels, offs, mask, 1.0, TOKENS, REVERSE)
        next_x = _tokens(x_ptr, origin, length, before, begin, end, channels, offs, mask, 0.0, TOKENS, REVERSE)
        rr, next_r = _rows(next_r, BLOCK), next_x
        if reset_ptr is not None:
            next_r = _tokens(reset_ptr, origin, length, before, begin, end, channels, offs, mask, 0, TOKENS, REVERSE)
        states = ()  # type: Any
        for i in tl.static_range(TOKENS):
            states += (state,)
            state = _step(state, aa[i], xx[i], rr[i], reset_ptr is not None)
        for k in tl.static_range(TOKENS - 1, -1, -1):
            live = mask & ((offs * 0 + first + k) < end)
            place = _place(origin, length, first + k, channels, offs, REVERSE)
            adjoint = carried
            if dh_ptr is not None:
                adjoint += dhs[k].to(tl.float32)
            tl.store(dx_ptr + place, adjoint.to(dx_ptr.dtype.element_ty), mask=live)
            grad = adjoint * states[k]
            carried = aa[k].to(tl.float32) * adjoint
            if reset_ptr is not None:
                grad = tl.where(rr[k] > 0, 0.0, grad)
                carried = tl.where(rr[k] > 0, 0.0, carried)
            tl.store(da_ptr + place, grad.to(da_ptr.dtype.element_ty), mask=live)
    if dinitial_ptr is not None and pid_s == 0:
        place = dinitial_ptr + sequence * channels + offs
        tl.store(place, carried.to(dinitial_ptr.dtype.element_ty), mask=mask)


class _Cut:
    """How channels and time are cut into programs, forward and backward alike."""

    def __init__(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None, reverse: bool) -> None:
        batch, seqlen = x.shape[:2]
        self.channels = max(1, x[0, 0].numel())
        self.nseqs = batch if cu_seqlens is None else cu_seqlens.numel() - 1
        blocks, segments = triton.cdiv(self.channels, BLOCK), 1
        slots = device_limits(x.device)[0] * SLOTS
        if cu_seqlens is None and blocks * batch < slots:
            # Cut in two, the inputs are read once more; it takes several parts to gain by that.
            segments = max(1, min(4 * slots // (blocks * batch), 64, seqlen // (4 * TOKENS)))
        segment = triton.cdiv(triton.cdiv(seqlen, segments), TOKENS) * TOKENS
        nsegments = max(1, triton.cdiv(seqlen, max(1, segment)))
        self.nsegments, self.grid = nsegments, (blocks, nsegments, self.nseqs)
        self.ints = (seqlen, segment, nsegments, self.channels)
        self.consts = {"BLOCK": BLOCK, "TOKENS": TOKENS, "REVERSE": bool(reverse)}
        self.new_segments = fresh((self.nseqs * nsegments * self.channels,), torch.float32, x.device)

    def launch(self, kernel: Any) -> Launch:
        return Launch(kernel, self.grid, self.consts, {"num_warps": WARPS})


@planned(SPEC, a=contiguous, x=contiguous, initial_state=contiguous, cu_seqlens=contiguous, reset=contiguous)
def linear_scan(
    *, a: torch.Tensor, x: torch.Tensor, initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
    reset: torch.Tensor | None, reverse: bool,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:  # fmt: skip
    """Plan `refold.ops.linear_scan`."""
    cut = _Cut(x, cu_seqlens, reverse)
    local = cut.launch(_linear_scan_segments_kernel) if cut.nsegments > 1 else None
    scan = cut.launch(_linear_scan_fwd_kernel)
    new_h = fresh_like(x)
    new_final = fresh((cut.nseqs, *x.shape[2:]), torch.float32, x.device)

    def run(a, x, initial_state, cu_seqlens, reset):
        h, final, stream = new_h(), new_final(), current_stream(x.device)
        state = factor = gone = final  # never read where there is one segment
        if local is not None:
            state, factor = cut.new_segments(), cut.new_segments()
            gone = state if reset is None else cut.new_segments()
            local(stream, reset, a, x, None, state, factor, gone, None, *cut.ints)
        scan(stream, cu_seqlens, reset, a, x, initial_state, state, factor, gone, h, final, *cut.ints)
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
    cut = _Cut(x, cu_seqlens, reverse)
    local = cut.launch(_linear_scan_segments_kernel) if cut.nsegments > 1 else None
    main = cut.launch(_linear_scan_bwd_kernel)
    borders = x.shape[0] * triton.cdiv(x.shape[1], TOKENS) + (0 if cu_seqlens is None else cut.nseqs)
    new_borders = fresh((borders * cut.channels,), torch.float32, x.device)
    new_da, new_dx = fresh_like(a), fresh_like(x)
    new_dinitial = None if initial_state is None else fresh_like(initial_state)

    def run(dh, dstate, a, x, initial_state, cu_seqlens, reset):
        stream = current_stream(x.device)
        state = factor = gone = adjoint = border = new_borders()
        if local is not None:
            state, factor, adjoint = cut.new_segments(), cut.new_segments(), cut.new_segments()
            gone = state if reset is None else cut.new_segments()
            local(stream, reset, a, x, dh, state, factor, gone, adjoint, *cut.ints)
        found = {"a": new_da(), "x": new_dx()}
        if new_dinitial is not None:
            found["initial_state"] = new_dinitial()
        main(
            stream, cu_seqlens, reset, a, x, initial_state, dh, dstate, state, factor, gone, adjoint, border,
            found["a"], found["x"], found.get("initial_state"), *cut.ints,
        )  # fmt: skip
        return found

    return run
