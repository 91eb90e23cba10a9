"""Gated RMS norm on GPUs with Triton: one launch, each input read once."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from refold.ops.launch import Launch, contiguous, current_stream, refusal, tensor_key
from refold.ops.spec import Meta
from refold.ops.ssd._triton_kernels import _silu

_PLANS: dict[Any, Any] = {}
MAX_GROUP = 65536


def supports(meta: Meta) -> str | None:
    """Return None if the kernel takes these arguments, else why not."""
    group = meta.options["group_size"] or meta.sizes["d"]
    if group > MAX_GROUP:
        return f"holds a group of channels on chip, at most {MAX_GROUP}; group_size={group}"
    return refusal(meta)


@triton.jit
def _gated_rmsnorm_fwd_kernel(
    x_ptr, z_ptr, weight_ptr, y_ptr, nrows, channels, stride_x, stride_z, group_size, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, NORM_FIRST: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows, groups): a program owns ROWS rows of one group of channels.

    Reads x and z once and writes y once; float32 sums. The last rows and the tail of a group may be ragged.
    """
    offs_r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    offs_in = tl.arange(0, BLOCK)
    offs_c = tl.program_id(1) * group_size + offs_in
    mask_c = (offs_in < group_size) & (offs_c < channels)
    mask = (offs_r < nrows) & mask_c[None, :]
    v = tl.load(x_ptr + offs_r * stride_x + offs_c[None, :], mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
    if z_ptr is not None:
        gate = _silu(tl.load(z_ptr + offs_r * stride_z + offs_c[None, :], mask=mask, other=0.0).to(tl.float32))
        if not NORM_FIRST:
            v *= gate
    scale = 1.0 / tl.sqrt(tl.sum(v * v, axis=1) / group_size + eps)
    y = v * scale[:, None] * weight[None, :]
    if NORM_FIRST and z_ptr is not None:
        y *= gate
    tl.store(y_ptr + offs_r * channels + offs_c[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


def gated_rmsnorm(
    *, x: torch.Tensor, z: torch.Tensor | None, weight: torch.Tensor, eps: float, group_size: int | None,
    norm_before_gate: bool,
) -> torch.Tensor:  # fmt: skip
    """Compute `refold.ops.gated_rmsnorm`."""
    channels = x.shape[-1]
    shape = x.shape
    x = _rows(x, channels)
    z = None if z is None else _rows(z, channels)
    weight = contiguous(weight)
    key = tensor_key(x), tensor_key(z), tensor_key(weight), eps, group_size, norm_before_gate, x.device
    plan = _PLANS.get(key)
    if plan is None:
        group = group_size or channels
        block = triton.next_power_of_2(group)
        rows = max(1, 1024 // block)
        warps = min(16, max(1, rows * block // 512))
        consts = {"ROWS": rows, "BLOCK": block, "NORM_FIRST": bool(norm_before_gate)}
        grid = (triton.cdiv(x.shape[0], rows), channels // group)
        launch = Launch(_gated_rmsnorm_fwd_kernel, grid, consts, {"num_warps": warps})
        plan = _PLANS[key] = (
            launch, (x.shape[0], channels, x.stride(0), 0 if z is None else z.stride(0), group, float(eps))
        )  # fmt: skip
    launch, numbers = plan
    y = torch.empty(shape, dtype=x.dtype, device=x.device)
    launch(current_stream(x.device), x, z, weight, y, *numbers)
    return y


def _rows(tensor: torch.Tensor, channels: int) -> torch.Tensor:
    """Return a tensor as rows of channels; a copy only where the rows are not evenly spaced."""
    tensor = tensor.reshape(-1, channels)
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()
