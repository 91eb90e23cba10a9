"""Gated RMS norm on GPUs with Triton: one launch, each input read once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from refold.ops.gated_rmsnorm.spec import SPEC
from refold.ops.spec import Meta
from refold.ops.ssd._triton_kernels import _silu
from refold.ops.torch.launch import Launch, contiguous, current_stream, fresh_like, planned, refusal

MAX_GROUP = 65536
MAX_PARTS = 8


def supports(meta: Meta) -> str | None:
    """Return None if the kernel takes these arguments, else why not."""
    group = meta.options["group_size"] or meta.sizes["d"]
    if group > MAX_GROUP:
        return f"holds a group of channels on chip, at most {MAX_GROUP}; group_size={group}"
    return refusal(meta)


@triton.jit
def _gated_rmsnorm_fwd_kernel(
    x_ptr, z_ptr, weight_ptr, y_ptr, nrows, channels, stride_x, stride_z, group_size, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, NORM_FIRST: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows, groups): a program owns ROWS rows of one group of channels, PARTS times BLOCK of them.

    Reads x and z once and writes y once; float32 sums. The last rows and the tail of a group may be ragged.
    """
    offs_r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    offs_in = tl.arange(0, BLOCK)
    offs_c = tl.program_id(1) * group_size + offs_in
    squares = tl.zeros((ROWS, BLOCK), tl.float32)
    values = ()  # type: Any
    gates = ()  # type: Any
    for i in tl.static_range(PARTS):
        mask = (offs_r < nrows) & (offs_in + i * BLOCK < group_size)[None, :]
        offs = (offs_c + i * BLOCK)[None, :]
        v = tl.load(x_ptr + offs_r * stride_x + offs, mask=mask, other=0.0).to(tl.float32)
        if z_ptr is not None:
            gate = _silu(tl.load(z_ptr + offs_r * stride_z + offs, mask=mask, other=0.0).to(tl.float32))
            if NORM_FIRST:
                gates += (gate,)
            else:
                v *= gate
        squares += v * v
        values += (v,)
    scale = 1.0 / tl.sqrt(tl.sum(squares, axis=1) / group_size + eps)
    for i in tl.static_range(PARTS):
        mask_c = offs_in + i * BLOCK < group_size
        weight = tl.load(weight_ptr + offs_c + i * BLOCK, mask=mask_c, other=0.0).to(tl.float32)
        y = values[i] * scale[:, None] * weight[None, :]
        if NORM_FIRST and z_ptr is not None:
            y *= gates[i]
        rows = y_ptr + offs_r * channels + (offs_c + i * BLOCK)[None, :]
        tl.store(rows, y.to(y_ptr.dtype.element_ty), mask=(offs_r < nrows) & mask_c[None, :])


def _even_rows(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return the tensor itself where it is rows of channels that are evenly spaced, else a copy."""
    if tensor is None:
        return None
    rows = tensor.reshape(-1, tensor.shape[-1])
    return tensor if rows.data_ptr() == tensor.data_ptr() and rows.stride(1) == 1 else tensor.contiguous()


@planned(SPEC, x=_even_rows, z=_even_rows, weight=contiguous)
def gated_rmsnorm(
    *, x: torch.Tensor, z: torch.Tensor | None, weight: torch.Tensor, eps: float, group_size: int | None,
    norm_before_gate: bool,
) -> Callable[..., torch.Tensor]:  # fmt: skip
    """Plan `refold.ops.gated_rmsnorm`."""
    channels = x.shape[-1]
    nrows = x.numel() // channels
    group = group_size or channels
    # Threads hold 8 neighbouring channels (16 bytes of 16 bits) a part; few, full parts waste the fewest lanes.
    warps = min(16, max(4, triton.next_power_of_2(triton.cdiv(group, 8 * 32 * MAX_PARTS))))
    block = min(triton.next_power_of_2(group), max(8 * 32 * warps, triton.next_power_of_2(group) // MAX_PARTS))
    consts: dict[str, Any] = {
        "ROWS": max(1, 1024 // block), "BLOCK": block, "PARTS": triton.cdiv(group, block),
        "NORM_FIRST": bool(norm_before_gate),
    }  # fmt: skip
    grid = (triton.cdiv(nrows, consts["ROWS"]), channels // group)
    launch = Launch(_gated_rmsnorm_fwd_kernel, grid, consts, {"num_warps": warps})
    stride_x, stride_z = (0 if a is None else a.reshape(-1, channels).stride(0) for a in (x, z))
    new_y = fresh_like(x)
    numbers = (nrows, channels, stride_x, stride_z, group, float(eps))

    def run(x, z, weight):
        y = new_y()
        launch(current_stream(x.device), x, z, weight, y, *numbers)
        return y

    return run
