"""Gated RMS norm on GPUs with Triton: one launch, each input read once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from refold.ops.gated_rmsnorm.spec import SPEC
from refold.ops.spec import Meta
from refold.ops.torch.launch import PTX, Launch, current_stream, planned, refusal
from refold.ops.torch.plans import contiguous, fresh_like
from refold.ops.torch.row_sums import RowSums
from refold.ops.torch.tables import device_limits
from refold.ops.triton.math import LOG2E, exp2, silu

MAX_GROUP = 65536
MAX_PARTS = 8
BACKWARD_TILE = 6144  # Values of a program of the backward that 8 warps hold in 128 registers per thread.


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
            gate = silu(tl.load(z_ptr + offs_r * stride_z + offs, mask=mask, other=0.0).to(tl.float32))
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


@triton.jit
def _gated_rmsnorm_bwd_kernel(
    x_ptr, z_ptr, weight_ptr, dy_ptr, dx_ptr, dz_ptr, dweight_ptr, nrows, channels, stride_x, stride_z, group_size, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, NORM_FIRST: tl.constexpr,
):  # fmt: skip
    """Grid (programs, groups): a program takes every so many blocks of ROWS rows of one group of channels.

    With v the normalised values, n = v scale and dn = dy weight: dv = scale (dn - n mean(dn n)). Reads x, z, dy once,
    writes dx, dz once, and one row of the weight's gradient at the end. Float32 sums. Ragged rows and groups.
    """
    offs_in = tl.arange(0, BLOCK)
    offs_c = tl.program_id(1) * group_size + offs_in
    totals = ()  # type: Any
    for _ in tl.static_range(PARTS):
        totals += (tl.zeros((ROWS, BLOCK), tl.float32),)
    for first in range(tl.program_id(0) * ROWS, nrows, tl.num_programs(0) * ROWS):
        offs_r = tl.program_id(0).to(tl.int64) * 0 + first + tl.arange(0, ROWS)[:, None]
        squares = tl.zeros((ROWS, BLOCK), tl.float32)
        products = tl.zeros((ROWS, BLOCK), tl.float32)
        xs = ()  # type: Any
        zs = ()  # type: Any
        dys = ()  # type: Any
        for i in tl.static_range(PARTS):
            mask = (offs_r < nrows) & (offs_in + i * BLOCK < group_size)[None, :]
            offs = (offs_c + i * BLOCK)[None, :]
            x = tl.load(x_ptr + offs_r * stride_x + offs, mask=mask, other=0.0)
            dy = tl.load(dy_ptr + offs_r * channels + offs, mask=mask, other=0.0)
            xs += (x,)
            dys += (dy,)
            v = x.to(tl.float32)
            weight = tl.load(weight_ptr + offs_c + i * BLOCK, mask=offs_in + i * BLOCK < group_size, other=0.0)
            dn = dy.to(tl.float32) * weight.to(tl.float32)[None, :]
            if z_ptr is not None:
                z = tl.load(z_ptr + offs_r * stride_z + offs, mask=mask, other=0.0)
                zs += (z,)
                gate = silu(z.to(tl.float32))
                if NORM_FIRST:
                    dn *= gate
                else:
                    v *= gate
            squares += v * v
            products += dn * v
        scale = 1.0 / tl.sqrt(tl.sum(squares, axis=1) / group_size + eps)
        mean = tl.sum(products, axis=1) * scale / group_size
        scale, mean = scale[:, None], mean[:, None]
        sums = ()  # type: Any
        for i in tl.static_range(PARTS):
            mask = (offs_r < nrows) & (offs_in + i * BLOCK < group_size)[None, :]
            offs = offs_r * channels + (offs_c + i * BLOCK)[None, :]
            x, dy = xs[i].to(tl.float32), dys[i].to(tl.float32)
            # From the cache again: registers are short.
            weight = tl.load(weight_ptr + offs_c + i * BLOCK, mask=offs_in + i * BLOCK < group_size, other=0.0)
            weight = weight.to(tl.float32)[None, :]
            v = x
            if z_ptr is not None:
                z = zs[i].to(tl.float32)
                # Formed again: were it kept from above, registers would spill.
                logistic = 1.0 / (1.0 + exp2(z * -LOG2E))
                gate = z * logistic
                slope = logistic + gate * (1.0 - logistic)
                if NORM_FIRST:
                    dz = dy * x * scale * weight * slope
                    dy *= gate
                else:
                    v *= gate
            n = v * scale
            sums += (totals[i] + dy * n,)
            dx = scale * (dy * weight - n * mean)
            if z_ptr is not None:
                if not NORM_FIRST:
                    dz = dx * x * slope
                    dx *= gate
                tl.store(dz_ptr + offs, dz.to(dz_ptr.dtype.element_ty), mask=mask)
            tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        totals = sums
    for i in tl.static_range(PARTS):
        total = tl.sum(totals[i], axis=0)
        row = dweight_ptr + tl.program_id(0) * channels + offs_c + i * BLOCK
        tl.store(row, total, mask=offs_in + i * BLOCK < group_size)


def _even_rows(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return the tensor itself where it is rows of channels that are evenly spaced, else a copy."""
    if tensor is None:
        return None
    rows = tensor.reshape(-1, tensor.shape[-1])
    return tensor if rows.data_ptr() == tensor.data_ptr() and rows.stride(1) == 1 else tensor.contiguous()


def _sizes(group: int) -> tuple[dict[str, int], int]:
    """Return the sizes of a program's tile, and its warps.

    Threads hold 8 neighbouring channels (16 bytes of 16 bits) a part; few, full parts waste the fewest lanes.
    """
    warps = min(16, max(4, triton.next_power_of_2(triton.cdiv(group, 8 * 32 * MAX_PARTS))))
    block = min(triton.next_power_of_2(group), max(8 * 32 * warps, triton.next_power_of_2(group) // MAX_PARTS))
    return {"ROWS": max(1, 1024 // block), "BLOCK": block, "PARTS": triton.cdiv(group, block)}, warps


@planned(SPEC, x=_even_rows, z=_even_rows, weight=contiguous)
def gated_rmsnorm(
    *, x: torch.Tensor, z: torch.Tensor | None, weight: torch.Tensor, eps: float, group_size: int | None,
    norm_before_gate: bool,
) -> Callable[..., torch.Tensor]:  # fmt: skip
    """Plan `refold.ops.gated_rmsnorm`."""
    channels = x.shape[-1]
    nrows = x.numel() // channels
    group = group_size or channels
    sizes, warps = _sizes(group)
    consts: dict[str, Any] = {**sizes, "NORM_FIRST": bool(norm_before_gate)}
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


@planned(SPEC, backward=True, dy=contiguous, x=_even_rows, z=_even_rows, weight=contiguous)
def gated_rmsnorm_backward(
    *, dy: torch.Tensor | None, needs: frozenset[str], x: torch.Tensor, z: torch.Tensor | None, weight: torch.Tensor,
    eps: float, group_size: int | None, norm_before_gate: bool,
) -> Callable[..., dict[str, torch.Tensor]]:  # fmt: skip
    """Plan the gradients of all array arguments that are present, whatever ``needs`` says."""
    channels = x.shape[-1]
    nrows = x.numel() // channels
    group = group_size or channels
    sizes, _ = _sizes(group)
    consts = {**sizes, "NORM_FIRST": bool(norm_before_gate)}
    ngroups, blocks = channels // group, triton.cdiv(nrows, sizes["ROWS"])
    few = sizes["ROWS"] * sizes["BLOCK"] * sizes["PARTS"] <= BACKWARD_TILE
    options = {"num_warps": 8 if few else 16}
    if few and PTX:
        options["maxnreg"] = 128  # So that two programs share a multiprocessor: one reads while the other one computes.
    resident = device_limits(x.device)[0] * (2 if few else 1)
    programs = max(1, min(blocks, resident // ngroups))
    launch = Launch(_gated_rmsnorm_bwd_kernel, (programs, ngroups), consts, options)
    stride_x, stride_z = (0 if a is None else a.reshape(-1, channels).stride(0) for a in (x, z))
    weights = RowSums(programs, (channels,), weight.dtype, x.device)
    new_dx, new_dz = fresh_like(x), None if z is None else fresh_like(z)
    numbers = (nrows, channels, stride_x, stride_z, group, float(eps))

    def run(dy, x, z, weight):
        stream, rows = current_stream(x.device), weights.rows()
        found = {"x": new_dx()}
        if new_dz is not None:
            found["z"] = new_dz()
        launch(stream, x, z, weight, dy, found["x"], found.get("z"), rows, *numbers)
        found["weight"] = weights(stream, rows)
        return found

    return run
