"""What a state that enters adds to a part of a sequence, and its gradient, on GPUs with Triton.

Results of a part are there as if zeros entered; `enter` adds ``gate_t C_t · (exp(L_t) S)``, with L the log decay up to
a token. `enter_backward` gives the gradient of S, ``Σ_t exp(L_t) C_t ⊗ (gate_t dy_t)``. Programs walk over blocks of
tokens, and each ends by itself where too little is left of the state of its head: the host asks for no size. Sums of
log decays per block, which `leave` and `enter_backward` write first, say what is left where a block begins.

y is rounded before `enter` adds to it, and once more after: in 16 bits, an error of up to half a unit in the last place
of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from refold.ops.spec import INTEGERS, Arg
from refold.ops.ssd._triton_kernels import load_log2_decays
from refold.ops.ssd.spec import SPEC
from refold.ops.ssd.tables import ENTER
from refold.ops.torch.launch import Launch, block_of, current_stream, last_contiguous, planned, products, strides
from refold.ops.torch.plans import contiguous, fresh
from refold.ops.torch.tables import device_limits, lookup
from refold.ops.triton.math import dot, exp2, silu
from refold.ops.triton.slots import spread

READ = [arg for arg in SPEC.args if arg.name in ("dt", "A", "C", "z", "dt_bias")]
END = Arg("end", ("",), optional=True, dtypes=INTEGERS)
LAYOUTS: dict[str, Any] = {"A": contiguous, "C": last_contiguous, "z": last_contiguous, "dt_bias": contiguous}


@triton.jit
def _tokens(end_ptr, seqlen):
    """Return how many of the first tokens are of the document that enters."""
    if end_ptr is not None:
        return tl.minimum(tl.maximum(tl.load(end_ptr), 0), seqlen).to(tl.int32)
    return seqlen


@triton.jit
def _ssd_enter_sums_kernel(
    dt_ptr, A_ptr, dt_bias_ptr, end_ptr, sums_ptr, seqlen, nblocks, nheads, dt_min, dt_max,
    stride_dt_b, stride_dt_t, stride_dt_h, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """Grid (blocks, blocks of heads, rows): a program adds up the log2 decays of BLOCK tokens, for BLOCK_H heads."""
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    start = tl.program_id(0) * BLOCK
    inside = start + tl.arange(0, BLOCK) < _tokens(end_ptr, seqlen)
    pid_b = tl.program_id(2).to(tl.int64)
    dt_rows = dt_ptr + pid_b * stride_dt_b + start.to(tl.int64) * stride_dt_t
    log2 = load_log2_decays(dt_rows, A_ptr, dt_bias_ptr, offs_h, offs_h < nheads, inside, stride_dt_t, stride_dt_h,
                            dt_min, dt_max, SOFTPLUS)  # fmt: skip
    at = (pid_b * nheads + offs_h) * nblocks + tl.program_id(0)
    tl.store(sums_ptr + at, tl.sum(log2, axis=1), mask=offs_h < nheads)


@triton.jit
def _ssd_leave_kernel(sums_ptr, state_ptr, move_ptr, out_ptr, rows, nblocks, size, BLOCK: tl.constexpr):
    """Grid (blocks of a state, rows * heads): copies states to ``out``, and behind them the map of each: its decay."""
    pid = tl.program_id(1).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    if state_ptr is not None:
        at = tl.program_id(0) * BLOCK + offs
        state = tl.load(state_ptr + pid * size + at, mask=at < size, other=0.0)
        tl.store(out_ptr + pid * size + at, state, mask=at < size)
    if tl.program_id(0) == 0:
        total = tl.zeros((BLOCK,), tl.float64)
        for first in range(0, nblocks, BLOCK):
            sums = tl.load(sums_ptr + pid * nblocks + first + offs, mask=first + offs < nblocks, other=0.0)
            total += sums.to(tl.float64)
        move = exp2(tl.sum(total, axis=0).to(tl.float32))
        tl.store(move_ptr + pid, move)
        if state_ptr is not None:
            tl.store(out_ptr + tl.cast(rows, tl.int64) * size + pid, move)


@triton.jit
def _decays(dt_ptr, A_ptr, dt_bias_ptr, base, pid_b, pid_h, start, inside, stride_dt_b, stride_dt_t, stride_dt_h,
            dt_min, dt_max, BLOCK: tl.constexpr, SOFTPLUS: tl.constexpr):  # fmt: skip
    """Return the decay of a state up to each token of a block, before which the log2 decay is ``base``."""
    head = pid_h + tl.arange(0, 1)
    dt_rows = dt_ptr + pid_b * stride_dt_b + start * stride_dt_t
    log2 = load_log2_decays(dt_rows, A_ptr, dt_bias_ptr, head, head >= 0, inside, stride_dt_t, stride_dt_h,
                            dt_min, dt_max, SOFTPLUS)  # fmt: skip
    return exp2(base.to(tl.float32) + tl.sum(tl.cumsum(log2, axis=1), axis=0))


@triton.jit
def _first(sums, walker, nblocks, WALKERS: tl.constexpr):
    """Return the log2 decay before the first block of a program."""
    offs = tl.arange(0, WALKERS)
    return tl.sum(tl.load(sums + offs, mask=(offs < walker) & (offs < nblocks), other=0.0).to(tl.float64), axis=0)


@triton.jit
def _next(sums, base, block, nblocks, WALKERS: tl.constexpr):
    """Return the log2 decay before the next block of a program, which is WALKERS blocks later."""
    offs = block + tl.arange(0, WALKERS)
    return base + tl.sum(tl.load(sums + offs, mask=offs < nblocks, other=0.0).to(tl.float64), axis=0)


@triton.jit
def _tile(ptr, pid_b, start, head, stride_b, stride_t, stride_h, offs_t, offs, mask):
    """Load what the tokens of a block have of a head or group, (tokens, ``offs``)."""
    rows = ptr + pid_b * stride_b + start * stride_t + head * stride_h
    return tl.load(rows + offs_t[:, None] * stride_t + offs[None, :], mask=mask, other=0.0)


@triton.jit
def _ssd_enter_kernel(
    dt_ptr, A_ptr, C_ptr, z_ptr, dt_bias_ptr, end_ptr, sums_ptr, state_ptr, move_ptr, y_ptr, final_ptr, kept_ptr,
    seqlen, nblocks, nheads, ngroups, headdim, dstate, dt_min, dt_max, least,
    stride_dt_b, stride_dt_t, stride_dt_h, stride_C_b, stride_C_t, stride_C_g, stride_z_b, stride_z_t, stride_z_h,
    BLOCK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, WALKERS: tl.constexpr,
    SOFTPLUS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (walkers, heads * blocks of channels, rows): a program takes every WALKERS-th block of tokens.

    Reads C, z and y where the state reaches, and writes y there; a program that it does not reach reads only sums. The
    last walker copies the state, adds what is left of it to the final one, and writes NaN for what is not finite.
    """
    blocks_p = tl.cdiv(headdim, BLOCK_P)
    walker = tl.program_id(0)
    pid_h = tl.program_id(1) // blocks_p
    pid_b = tl.program_id(2).to(tl.int64)
    pid_g = pid_h // (nheads // ngroups)
    offs_t = tl.arange(0, BLOCK)
    offs_n = tl.arange(0, BLOCK_N)
    offs_p = tl.program_id(1) % blocks_p * BLOCK_P + tl.arange(0, BLOCK_P)
    mask_p = offs_p < headdim
    mask_n = offs_n < dstate
    mask_np = mask_n[:, None] & mask_p[None, :]
    row = pid_b * nheads + pid_h
    at = row * headdim * dstate
    offs_np = offs_p[None, :] * dstate + offs_n[:, None]
    tokens = _tokens(end_ptr, seqlen)
    sums = sums_ptr + row * nblocks
    base = _first(sums, walker, nblocks, WALKERS)
    last = walker == WALKERS - 1
    reached = (walker * BLOCK < tokens) & ((base >= least) | (base != base))
    state = tl.load(state_ptr + at + offs_np, mask=spread(reached | last, mask_np), other=0.0)
    spoiled = tl.max((~(tl.abs(state) < float("inf"))).to(tl.int32), axis=0)
    y_rows = y_ptr + (pid_b * seqlen * nheads + pid_h) * headdim + offs_p[None, :]
    operand = state.to(C_ptr.dtype.element_ty)
    block = walker
    while (block * BLOCK < tokens) & ((base >= least) | (base != base)):
        start = block.to(tl.int64) * BLOCK
        inside = block * BLOCK + offs_t < tokens
        mask_tp = inside[:, None] & mask_p[None, :]
        C_tile = _tile(C_ptr, pid_b, start, pid_g, stride_C_b, stride_C_t, stride_C_g, offs_t, offs_n,
                       inside[:, None] & mask_n[None, :])  # fmt: skip
        y_tile = y_rows + (start + offs_t[:, None]) * (nheads * headdim)
        y = tl.load(y_tile, mask=mask_tp, other=0.0).to(tl.float32)
        left = _decays(dt_ptr, A_ptr, dt_bias_ptr, base, pid_b, pid_h, start, inside, stride_dt_b, stride_dt_t,
                       stride_dt_h, dt_min, dt_max, BLOCK, SOFTPLUS)  # fmt: skip
        base = _next(sums, base, block, nblocks, WALKERS)
        added = dot(C_tile, operand, None, PRECISION) * left[:, None]
        added = tl.where(spoiled[None, :] > 0, float("nan"), added)
        if z_ptr is not None:
            z_tile = _tile(z_ptr, pid_b, start, pid_h, stride_z_b, stride_z_t, stride_z_h, offs_t, offs_p, mask_tp)
            added *= silu(z_tile.to(tl.float32))
        tl.store(y_tile, (y + added).to(y_ptr.dtype.element_ty), mask=mask_tp)
        block += WALKERS
    if last:
        move = tl.load(move_ptr + row)
        for first in range(0, dstate, 32):  # some at a time: all at once would take the registers of two programs
            n = first + tl.arange(0, 32)
            offs = at + offs_p[None, :] * dstate + n[:, None]
            mask = (n < dstate)[:, None] & mask_p[None, :]
            part = tl.load(state_ptr + offs, mask=mask, other=0.0)
            tl.store(kept_ptr + offs, part, mask=mask)
            if final_ptr is not None:
                tl.store(final_ptr + offs, tl.load(final_ptr + offs, mask=mask, other=0.0) + move * part, mask=mask)
        if tl.max(spoiled, axis=0) > 0:
            for first in range(0, tokens, BLOCK):
                t = first + offs_t[:, None]
                nothing = tl.full((BLOCK, BLOCK_P), float("nan"), tl.float32).to(y_ptr.dtype.element_ty)
                mask = (t < tokens) & (spoiled > 0)[None, :]
                tl.store(y_rows + t.to(tl.int64) * (nheads * headdim), nothing, mask=mask)


@triton.jit
def _ssd_enter_bwd_kernel(
    dt_ptr, A_ptr, C_ptr, z_ptr, dt_bias_ptr, end_ptr, sums_ptr, dy_ptr, parts_ptr, reached_ptr,
    seqlen, nblocks, nheads, ngroups, headdim, dstate, dt_min, dt_max, least,
    stride_dt_b, stride_dt_t, stride_dt_h, stride_C_b, stride_C_t, stride_C_g, stride_z_b, stride_z_t, stride_z_h,
    stride_dy_b, stride_dy_t, stride_dy_h,
    BLOCK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, WALKERS: tl.constexpr,
    SOFTPLUS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid as of `_ssd_enter_kernel`: a program writes whether it is reached, and then its part of the gradient."""
    blocks_p = tl.cdiv(headdim, BLOCK_P)
    walker = tl.program_id(0)
    pid_h = tl.program_id(1) // blocks_p
    pid_b = tl.program_id(2).to(tl.int64)
    pid_g = pid_h // (nheads // ngroups)
    offs_t = tl.arange(0, BLOCK)
    offs_n = tl.arange(0, BLOCK_N)
    offs_p = tl.program_id(1) % blocks_p * BLOCK_P + tl.arange(0, BLOCK_P)
    mask_p = offs_p < headdim
    mask_n = offs_n < dstate
    row = pid_b * nheads + pid_h
    tokens = _tokens(end_ptr, seqlen)
    sums = sums_ptr + row * nblocks
    base = _first(sums, walker, nblocks, WALKERS)
    reached = (walker * BLOCK < tokens) & ((base >= least) | (base != base))
    tl.store(reached_ptr + row * WALKERS + walker, reached.to(tl.int8))  # all blocks of channels write the same
    gradient = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    block = walker
    while (block * BLOCK < tokens) & ((base >= least) | (base != base)):
        start = block.to(tl.int64) * BLOCK
        inside = block * BLOCK + offs_t < tokens
        mask_tp = inside[:, None] & mask_p[None, :]
        C_tile = _tile(C_ptr, pid_b, start, pid_g, stride_C_b, stride_C_t, stride_C_g, offs_t, offs_n,
                       inside[:, None] & mask_n[None, :])  # fmt: skip
        dy = _tile(dy_ptr, pid_b, start, pid_h, stride_dy_b, stride_dy_t, stride_dy_h, offs_t, offs_p, mask_tp)
        dy = dy.to(tl.float32)
        if z_ptr is not None:
            z_tile = _tile(z_ptr, pid_b, start, pid_h, stride_z_b, stride_z_t, stride_z_h, offs_t, offs_p, mask_tp)
            dy *= silu(z_tile.to(tl.float32))
        left = _decays(dt_ptr, A_ptr, dt_bias_ptr, base, pid_b, pid_h, start, inside, stride_dt_b, stride_dt_t,
                       stride_dt_h, dt_min, dt_max, BLOCK, SOFTPLUS)  # fmt: skip
        base = _next(sums, base, block, nblocks, WALKERS)
        gradient = dot(tl.trans((dy * left[:, None]).to(C_tile.dtype)), C_tile, gradient, PRECISION)
        block += WALKERS
    part = (row * WALKERS + walker) * headdim * dstate
    tl.store(parts_ptr + part + offs_p[:, None] * dstate + offs_n[None, :], gradient,
             mask=spread(reached, mask_p[:, None] & mask_n[None, :]))  # fmt: skip


@triton.jit
def _ssd_enter_bwd_sum_kernel(
    parts_ptr, reached_ptr, move_ptr, dstate_ptr, out_ptr, rows, size, WALKERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of a state, rows * heads): writes to ``out`` the sum of the walkers' parts, and behind it the maps.

    Of a final state's gradient, what the map leaves is added.
    """
    pid = tl.program_id(1).to(tl.int64)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < size
    move = tl.load(move_ptr + pid)
    total = tl.zeros((BLOCK,), tl.float32)
    if parts_ptr is not None:
        for walker in tl.static_range(WALKERS):
            own = pid * WALKERS + walker
            total += tl.load(parts_ptr + own * size + offs, mask=spread(tl.load(reached_ptr + own), mask), other=0.0)
    if dstate_ptr is not None:
        total += move * tl.load(dstate_ptr + pid * size + offs, mask=mask, other=0.0)
    tl.store(out_ptr + pid * size + offs, total, mask=mask)
    if tl.program_id(0) == 0:
        tl.store(out_ptr + tl.cast(rows, tl.int64) * size + pid, move)


class _Walk:
    """How one combination of shapes, strides, dtypes and options is walked over."""

    def __init__(self, dt, C, z, state, dt_softplus, dt_limit, least) -> None:
        batch, seqlen, nheads = dt.shape
        ngroups, dstate = C.shape[-2:]
        headdim = state.shape[-2]
        config = lookup(ENTER, C.device, C.dtype)
        block, block_n = config["block"], max(16, triton.next_power_of_2(dstate))
        block_p = block_of(headdim, block_n, config["block_p"], config["tile"])
        precision = products(config.get("precision", "ieee"), C.dtype, block, block_p, block_n)
        self.rows, self.size = batch * nheads, headdim * dstate
        self.nblocks = triton.cdiv(seqlen, block)
        programs = self.rows * triton.cdiv(headdim, block_p)
        slots = device_limits(C.device)[0] * config["slots"]
        walkers = min(triton.next_power_of_2(self.nblocks), max(1, triton.next_power_of_2(slots // programs)))
        self.walkers = min(walkers, config["walkers"])
        limits, softplus = (float(dt_limit[0]), float(dt_limit[1])), {"SOFTPLUS": bool(dt_softplus)}
        if dt_limit[0] < 0 and not dt_softplus:  # a later token could bring a state back
            least = -math.inf
        self.sums_ints = (seqlen, self.nblocks, nheads, *limits, *dt.stride())
        block_h = min(64, triton.next_power_of_2(nheads))
        self.sums = Launch(
            _ssd_enter_sums_kernel, (self.nblocks, triton.cdiv(nheads, block_h), batch),
            {"BLOCK": block, "BLOCK_H": block_h, **softplus}, {"num_warps": 4},
        )  # fmt: skip
        self.new_sums = fresh((batch, nheads, self.nblocks), torch.float32, C.device)
        self.ints = (
            seqlen, self.nblocks, nheads, ngroups, headdim, dstate, *limits, least / math.log(2.0),
            *dt.stride(), *C.stride()[:3], *strides(z, 3),
        )  # fmt: skip
        self.grid = self.walkers, programs // batch, batch
        self.consts = {"BLOCK": block, "BLOCK_P": block_p, "BLOCK_N": block_n, "WALKERS": self.walkers, **softplus}
        self.consts |= {"PRECISION": precision}
        self.options = {"num_warps": config["warps"], "num_stages": 1}
        if "registers" in config and C.element_size() == 2:
            self.options["maxnreg"] = config["registers"]

    def over_states(self, kernel: Any, blocks: int, **consts: Any) -> Launch:
        """Return the launch of a kernel over the elements of all states."""
        return Launch(kernel, (blocks, self.rows), {**consts, "BLOCK": 1024}, {"num_warps": 4})


@planned(replace(SPEC, args=(*READ, END, Arg("state", ("b h p n",)), Arg("out", ("",), optional=True))), **LAYOUTS)
def leave(
    *, dt: torch.Tensor, C: torch.Tensor, z: torch.Tensor | None, state: torch.Tensor, out: torch.Tensor | None,
    dt_softplus: bool, dt_limit: tuple[float, float], **_: Any,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:  # fmt: skip
    """Plan what a part leaves: (sums for `enter`, map); ``out``, if given, takes the state and the map, flat."""
    walk = _Walk(dt, C, z, state, dt_softplus, dt_limit, 0.0)
    new_move = fresh((*state.shape[:2], 1, 1), torch.float32, C.device)
    launch = walk.over_states(_ssd_leave_kernel, 1 if out is None else triton.cdiv(walk.size, 1024))

    def run(dt, A, C, z, dt_bias, end, state, out):
        stream, sums, move = current_stream(dt.device), walk.new_sums(), new_move()
        walk.sums(stream, dt, A, dt_bias, end, sums, *walk.sums_ints)
        launch(stream, sums, None if out is None else state, move, out, walk.rows, walk.nblocks, walk.size)
        return sums, move

    return run


_ENTERED = [Arg(name, ("",), optional=True) for name in ("sums", "state", "move", "y", "final", "kept")]


@planned(replace(SPEC, args=(*READ, END, *_ENTERED)), **LAYOUTS)
def enter(
    *, dt: torch.Tensor, C: torch.Tensor, z: torch.Tensor | None, state: torch.Tensor, dt_softplus: bool,
    dt_limit: tuple[float, float], least: float, **_: Any,
) -> Callable[..., None]:  # fmt: skip
    """Plan to add what a state adds: to y, where more than exp(``least``) of it is left, and to the final state."""
    walk = _Walk(dt, C, z, state, dt_softplus, dt_limit, least)
    launch = Launch(_ssd_enter_kernel, walk.grid, walk.consts, walk.options)
    return lambda *arrays: launch(current_stream(arrays[0].device), *arrays, *walk.ints)


_LEAVING = [Arg(name, ("",), optional=True) for name in ("state", "move", "dy", "dfinal", "out")]


@planned(replace(SPEC, args=(*READ, END, *_LEAVING)), **LAYOUTS, dy=last_contiguous, dfinal=contiguous)
def enter_backward(
    *, dt: torch.Tensor, C: torch.Tensor, z: torch.Tensor | None, state: torch.Tensor, dy: torch.Tensor | None,
    dt_softplus: bool, dt_limit: tuple[float, float], least: float, **_: Any,
) -> Callable[..., None]:  # fmt: skip
    """Plan the gradient of a state that enters; ``out`` takes it and the map, flat."""
    walk = _Walk(dt, C, z, state, dt_softplus, dt_limit, least)
    launch = Launch(_ssd_enter_bwd_kernel, walk.grid, walk.consts, walk.options)
    new_parts = fresh((walk.rows, walk.walkers, walk.size), torch.float32, C.device)
    new_reached = fresh((walk.rows, walk.walkers), torch.int8, C.device)
    add = walk.over_states(_ssd_enter_bwd_sum_kernel, triton.cdiv(walk.size, 1024), WALKERS=walk.walkers)
    dy_strides = () if dy is None else dy.stride()[:3]

    def run(dt, A, C, z, dt_bias, end, state, move, dy, dfinal, out):
        stream, parts, reached = current_stream(dt.device), None, None
        if dy is not None:
            sums, parts, reached = walk.new_sums(), new_parts(), new_reached()
            walk.sums(stream, dt, A, dt_bias, end, sums, *walk.sums_ints)
            launch(stream, dt, A, C, z, dt_bias, end, sums, dy, parts, reached, *walk.ints, *dy_strides)
        add(stream, parts, reached, move, dfinal, out, walk.rows, walk.size)

    return run
