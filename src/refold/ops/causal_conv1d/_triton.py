"""Causal depthwise convolution and its step on GPUs with Triton: one launch each."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from refold.ops.launch import Launch, contiguous, current_stream, last_contiguous, refusal, tensor_key
from refold.ops.spec import Meta
from refold.ops.ssd._triton_kernels import _silu

_PLANS: dict[Any, Any] = {}


def supports(meta: Meta) -> str | None:
    """Return None if the kernels take these arguments, else why not."""
    return refusal(meta)


@triton.jit
def _causal_conv1d_fwd_kernel(
    cu_seqlens_ptr, x_ptr, weight_ptr, bias_ptr, initial_ptr, y_ptr, final_ptr,
    seqlen, channels, blocks_t, nseqs, stride_x_b, stride_x_t,
    WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, SILU: tl.constexpr,
    VARLEN: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of channels, blocks of time + states, batch): a program owns a tile of y, or one final state.

    Reads x WIDTH times, all but once from the L1 cache; float32 sums. Time, channels and sequences may be ragged.
    """
    offs_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    pid_t = tl.program_id(1)
    pid_b = tl.program_id(2).to(tl.int64)
    mask_d = offs_d < channels
    x_base = x_ptr + pid_b * stride_x_b
    if pid_t < blocks_t:
        offs_t = pid_t * BLOCK_T + tl.arange(0, BLOCK_T)
        inside = offs_t < seqlen
        seq = tl.zeros((BLOCK_T,), tl.int32) + tl.program_id(2)
        start = tl.zeros((BLOCK_T,), tl.int32)
        if VARLEN:
            # The last sequence that starts at or before a token; of empty ones, the one that holds it.
            low = tl.zeros((BLOCK_T,), tl.int32)
            high = tl.zeros((BLOCK_T,), tl.int32) + nseqs
            span = nseqs
            while span > 0:
                middle = (low + high) // 2
                before = tl.load(cu_seqlens_ptr + middle).to(tl.int32) <= offs_t
                low = tl.where(before, middle, low)
                high = tl.where(before, high, middle)
                span = span // 2
            seq = low
            start = tl.load(cu_seqlens_ptr + seq).to(tl.int32)
        y = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)[None, :]
        for j in tl.static_range(WIDTH):
            source = offs_t - (WIDTH - 1) + j
            mask = (inside & (source >= start))[:, None] & mask_d[None, :]
            tap = tl.load(x_base + source.to(tl.int64)[:, None] * stride_x_t + offs_d[None, :], mask=mask, other=0.0)
            tap = tap.to(tl.float32)
            if initial_ptr is not None:
                old = seq.to(tl.int64)[:, None] * channels + offs_d[None, :]
                old = old * (WIDTH - 1) + (source - start + WIDTH - 1)[:, None]
                early = (inside & (source < start))[:, None] & mask_d[None, :]
                tap += tl.load(initial_ptr + old, mask=early, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + offs_d * WIDTH + j, mask=mask_d, other=0.0).to(tl.float32)
            y += tap * weight[None, :]
        if SILU:
            y = _silu(y)
        y_rows = y_ptr + (pid_b * seqlen + offs_t.to(tl.int64))[:, None] * channels
        tl.store(y_rows + offs_d[None, :], y.to(y_ptr.dtype.element_ty), mask=inside[:, None] & mask_d[None, :])
    else:
        begin = 0
        length = seqlen
        row = pid_b
        if VARLEN:
            row = (pid_t - blocks_t).to(tl.int64)
            begin = tl.load(cu_seqlens_ptr + row).to(tl.int32)
            length = tl.load(cu_seqlens_ptr + row + 1).to(tl.int32) - begin
        offs_w = tl.arange(0, BLOCK_W)
        place = length + offs_w  # in initial state and inputs, one after the other
        live = mask_d[:, None] & (offs_w < WIDTH - 1)[None, :]
        origin = (begin + place - (WIDTH - 1)).to(tl.int64)
        new = tl.load(x_base + origin[None, :] * stride_x_t + offs_d[:, None],
                      mask=live & (place >= WIDTH - 1)[None, :], other=0.0).to(tl.float32)  # fmt: skip
        cells = (row * channels + offs_d[:, None]) * (WIDTH - 1)
        if initial_ptr is not None:
            new += tl.load(initial_ptr + cells + place[None, :], mask=live & (place < WIDTH - 1)[None, :],
                           other=0.0).to(tl.float32)  # fmt: skip
        tl.store(final_ptr + cells + offs_w[None, :], new.to(final_ptr.dtype.element_ty), mask=live)


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
            y = _silu(y)
        tl.store(y_ptr + (pid_b * ntokens + t) * channels + offs_d, y.to(y_ptr.dtype.element_ty), mask=mask_d)
    place = ntokens + offs_w
    live = mask_d[:, None] & (offs_w < WIDTH - 1)[None, :]
    new = tl.load(x_base + (place - (WIDTH - 1))[None, :] * stride_x_t + offs_d[:, None],
                  mask=live & (place >= WIDTH - 1)[None, :], other=0.0).to(tl.float32)  # fmt: skip
    new += tl.load(state_ptr + cells[:, None] + place[None, :], mask=live & (place < WIDTH - 1)[None, :],
                   other=0.0).to(tl.float32)  # fmt: skip
    tl.debug_barrier()
    tl.store(new_state_ptr + cells[:, None] + offs_w[None, :], new.to(new_state_ptr.dtype.element_ty), mask=live)


def causal_conv1d(
    *, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None, activation: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute `refold.ops.causal_conv1d`."""
    x = last_contiguous(x)
    weight, bias, initial_state, cu_seqlens = (contiguous(a) for a in (weight, bias, initial_state, cu_seqlens))
    key = (
        tensor_key(x), tensor_key(weight), tensor_key(bias), tensor_key(initial_state), tensor_key(cu_seqlens),
        activation, x.device,
    )  # fmt: skip
    plan = _PLANS.get(key)
    if plan is None:
        batch, seqlen, channels = x.shape
        width = weight.shape[1]
        nseqs = batch if cu_seqlens is None else cu_seqlens.numel() - 1
        block_t, block_d = 32, 128
        blocks_t = triton.cdiv(seqlen, block_t)
        consts = {
            "WIDTH": width, "BLOCK_W": triton.next_power_of_2(max(1, width - 1)), "BLOCK_T": block_t,
            "BLOCK_D": block_d, "SILU": activation == "silu", "VARLEN": cu_seqlens is not None,
        }  # fmt: skip
        states = nseqs if cu_seqlens is not None else 1
        grid = (triton.cdiv(channels, block_d), blocks_t + states, batch)
        launch = Launch(_causal_conv1d_fwd_kernel, grid, consts, {"num_warps": 4})
        plan = _PLANS[key] = (
            launch, (seqlen, channels, blocks_t, nseqs, *x.stride()[:2]), (nseqs, channels, width - 1)
        )  # fmt: skip
    launch, ints, state_shape = plan
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    final = torch.empty(state_shape, dtype=x.dtype, device=x.device)
    launch(current_stream(x.device), cu_seqlens, x, weight, bias, initial_state, y, final, *ints)
    return y, final


def causal_conv1d_step(
    *, x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `refold.ops.causal_conv1d_step`."""
    new_state = torch.empty(state.shape, dtype=state.dtype, device=state.device)
    return _step(x, weight, contiguous(state), new_state, bias, activation), new_state


def causal_conv1d_step_(*, state: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """Compute `refold.ops.causal_conv1d_step_`: the window is overwritten, the outputs are returned."""
    own = contiguous(state)
    y = _step(state=own, new_state=own, **inputs)
    if own is not state:
        state.copy_(own)
    return y


def _step(x, weight, state, new_state, bias, activation) -> torch.Tensor:
    x, weight, bias = last_contiguous(x), contiguous(weight), contiguous(bias)
    key = (
        tensor_key(x), tensor_key(weight), tensor_key(bias), tensor_key(state), tensor_key(new_state), activation,
        x.device,
    )  # fmt: skip
    plan = _PLANS.get(key)
    if plan is None:
        batch, channels, _ = state.shape
        width = weight.shape[1]
        one = x.dim() == 2
        consts = {
            "WIDTH": width, "BLOCK_W": triton.next_power_of_2(max(1, width - 1)), "BLOCK_D": 256,
            "SILU": activation == "silu",
        }  # fmt: skip
        launch = Launch(_causal_conv1d_step_kernel, (triton.cdiv(channels, 256), batch), consts, {"num_warps": 4})
        ints = (1 if one else x.shape[1], channels, x.stride(0), 0 if one else x.stride(1))
        plan = _PLANS[key] = (launch, ints)
    launch, ints = plan
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(current_stream(x.device), x, weight, bias, state, new_state, y, *ints)
    return y
