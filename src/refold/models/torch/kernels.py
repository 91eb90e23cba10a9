"""Triton kernels for one token per row: products that begin with a norm, the steps of the scans, and attention.

A token costs one read of the weights. So each kernel also does the work that would otherwise be a separate pass over
small arrays: the norm before a product, the convolution or the sum after it. A kernel starts while the kernel before it
ends (programmatic dependent launch, if the device has it). It requests weights and states at once, because the kernel
before it does not write them, and then waits for the results that it needs. Activations between kernels are float32.
"""

from __future__ import annotations

import math
from functools import cache
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from refold.ops.torch.launch import INTERPRETED, gluon
from refold.ops.torch.tables import device_limits
from refold.ops.triton.math import LOG2E, clip, dot, exp2, silu, softplus

MOST_ROWS = 64
"""Rows that a product takes; more are bound by arithmetic, which matrix libraries know better."""
AHEAD_ROWS = 16
"""Rows that a product with weights requested ahead of time takes."""
AHEAD_SIZE = 16384
"""Inputs that such a product takes: its loop over them is unrolled."""
SHARED_BYTES = 1 << 24
"""Bytes of ``dt_proj`` that the rows of a step may read in all; beyond, four rows read it together."""

SPLIT_PROGRAMS = 8
"""Programs per multiprocessor among which attention splits the past; each keeps two tiles in flight."""
MOST_SPLITS = 128
"""Parts of a row's past, at most; more would cost more to combine than they save."""
CACHE_TILE = 4096
"""Numbers of a tile of keys, and of one of values."""
LEAST = tl.constexpr(-3.4028234663852886e38)
"""The maximum of no scores: finite, so that a difference from it is no NaN."""


def takes(x: Tensor, weight: Tensor, group_size: int | None) -> bool:
    """Whether `project` takes a product: a plain weight, and one row, or few of 16 bits."""
    size = weight.shape[1]
    if not weight.is_contiguous() or weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    if len(x) == 1:
        return group_size in (None, size) or _block_k(group_size, 512) >= 16
    return weight.dtype != torch.float32 and len(x) <= MOST_ROWS and (group_size or size) <= 65536


def project(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None, eps: float, group_size: int | None,
    gated: bool, convolution: tuple[Tensor, Tensor, Tensor | None, Tensor | None, int] | None = None,
    onto: Tensor | None = None, scale: float = 1.0, out: Tensor | None = None, factors: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute `steps.project`, with what `steps.project_and_convolve_` or `steps.add_projected_` do after it.

    Args:
        x: As in `steps.project`, like the next six.
        weight: ``(out, size)``.
        bias: ``(out,)``.
        norm: ``(size,)``.
        eps: For the norm.
        group_size: For the norm.
        gated: x has two halves.
        convolution: Window, taps, bias, active, first channel. The window may be the last columns of a wider one.
        onto: What the product is added to, ``(b, out)``, contiguous.
        scale: The product with its bias is multiplied by it.
        out: Where the result goes, ``(b, out)``, contiguous, of any dtype; may be ``onto``. None makes one in float32.
        factors: ``(out,)``: the product is multiplied by these, too, before the convolution.
    """
    batch, (nout, size) = len(x), weight.shape
    group = group_size or size
    if batch > 1 and (gated or norm is not None or x.dtype != weight.dtype):
        x, norm, gated = _prepare(x, weight.dtype, norm, eps, group, gated), None, False
    x = x if x.stride(-1) == 1 else x.contiguous()
    if out is None:
        out = torch.empty(batch, nout, dtype=torch.float32, device=x.device)
    window, taps, taps_bias, active, first = convolution or (None, None, None, None, 0)
    consts = {
        "SIZE": size, "WIDTH": 1 if taps is None else taps.shape[1], "APART": 1 if window is None else window.stride(1)
    }  # fmt: skip
    if batch > 1 and (ahead := _ahead(x, weight)) is not None:
        block_o, block_k, stages, warps, down = _ahead_config(nout, size)
        ahead._project_rows_ahead_kernel[(triton.cdiv(nout, block_o),)](
            x, weight, bias, factors, onto, out, window, taps, taps_bias, active, batch, nout, x.stride(0), scale,
            first, 0 if taps is None else len(taps), **consts, BLOCK_O=block_o, BLOCK_B=AHEAD_ROWS, BLOCK_K=block_k,
            STAGES=min(stages, triton.cdiv(size, block_k) + 1), DOWN=down, num_warps=warps, **_pdl(x.device),
        )  # fmt: skip
        return out
    block_b = triton.next_power_of_2(batch)
    if batch == 1:
        block_o, warps = _row_config(size * weight.element_size())
    else:
        # More programs where there are few outputs.
        block_o, block_k, stages = (64, 128, 4) if nout > 2 * size else (32, 256, 4)
        block_b, block_k = max(16, block_b), min(block_k, max(16, triton.next_power_of_2(size)))
        _, shared = device_limits(x.device)
        stages = max(1, min(stages, shared // ((block_o + block_b) * block_k * weight.element_size())))
    grid = (triton.cdiv(nout, block_o),)
    arguments = (
        x, weight, bias, factors, norm, onto, out, window, taps, taps_bias, active, batch, nout, x.stride(0), eps,
        scale, first, 0 if taps is None else len(taps),
    )  # fmt: skip
    consts |= {"PDL": dependent(x.device), "BLOCK_O": block_o}
    if batch == 1:
        block_k = _block_k(group, 1024)
        if block_k < 64 and group == size:
            block_k = min(1024, triton.next_power_of_2(size))
        _project_row_kernel[grid](
            *arguments, **consts, GROUP=group, GATED=gated, BLOCK_K=block_k, num_warps=warps, **_pdl(x.device)
        )
    else:
        _project_rows_kernel[grid](
            *arguments, **consts, BLOCK_B=block_b, BLOCK_K=block_k, STAGES=stages,
            PRECISION="widen" if INTERPRETED else "ieee", num_warps=4, **_pdl(x.device),
        )  # fmt: skip
    return out


def _ahead(x: Tensor, weight: Tensor) -> ModuleType | None:
    """Return the kernel in Gluon for up to 16 rows, if the device starts kernels early and rows can be copied."""
    if len(x) > AHEAD_ROWS or weight.shape[1] > AHEAD_SIZE:
        return None
    if weight.dtype == torch.float32 or not dependent(x.device):
        return None
    aligned = weight.shape[1] % 16 == 0 and x.stride(0) % 16 == 0
    if not aligned or any(a.data_ptr() % 16 for a in (x, weight)):
        return None
    return gluon("refold.models.torch._gluon_kernels")


def normalised(x: Tensor, norm: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Return the RMS norm of several rows times ``norm + offset``, in the weight's dtype."""
    return _prepare(x, norm.dtype, norm, eps, len(norm), False, offset)


def _prepare(
    x: Tensor, dtype: torch.dtype, norm: Tensor | None, eps: float, group: int, gated: bool, offset: float = 0.0
) -> Tensor:
    """Gate or normalise several rows before their product, in the weight's dtype."""
    batch, size = len(x), x.shape[1] // (1 + gated)
    y = torch.empty(batch, size, dtype=dtype, device=x.device)
    block = triton.next_power_of_2(group)
    _prepare_kernel[(batch, size // group)](
        x, norm, y, x.stride(0), size, group, eps, offset, GATED=gated, BLOCK=block, PDL=dependent(x.device),
        num_warps=min(16, max(1, block // 256)), **_pdl(x.device),
    )  # fmt: skip
    return y


def ssd_(
    x: Tensor, B: Tensor, C: Tensor, dt: Tensor, z: Tensor, A_log: Tensor, D: Tensor, dt_bias: Tensor,
    dt_limit: tuple[float, float], state: Tensor, active: Tensor | None,
) -> Tensor:  # fmt: skip
    """Compute `steps.ssd_`; heads and groups of x, B, C and z lie one after the other."""
    batch, nheads, headdim, dstate = state.shape
    y = torch.empty(batch, nheads, headdim, dtype=torch.float32, device=x.device)
    block_n = triton.next_power_of_2(dstate)
    block_p = min(triton.next_power_of_2(headdim), max(1, 2048 // block_n))
    _ssd_step_kernel[(triton.cdiv(headdim, block_p), nheads, batch)](
        x, dt, A_log, B, C, D, z, dt_bias, state, y, active, nheads, B.shape[1], headdim, dstate,
        float(dt_limit[0]), float(dt_limit[1]), x.stride(0), dt.stride(0), B.stride(0), C.stride(0), z.stride(0),
        BLOCK_P=block_p, BLOCK_N=block_n, PDL=dependent(x.device), num_warps=4 if state.dtype == torch.float32 else 2,
        **_pdl(x.device),
    )  # fmt: skip
    return y


def selective_scan_(
    x: Tensor, dt: Tensor, B: Tensor, C: Tensor, z: Tensor, dt_proj: Tensor, dt_bias: Tensor, A_log: Tensor, D: Tensor,
    state: Tensor, active: Tensor | None, eps: float | None, norms: tuple[Tensor, Tensor, Tensor] | None,
) -> Tensor:  # fmt: skip
    """Compute `steps.selective_scan_`; values of a row lie one after the other, parameters are contiguous."""
    batch, channels, dstate = state.shape
    rank = dt_proj.shape[1]
    y = torch.empty(batch, channels, dtype=torch.float32, device=x.device)
    block_d = min(32, max(8, triton.next_power_of_2(channels // 256)))
    rows = 1 if batch * dt_proj.nbytes <= SHARED_BYTES else 4
    dt_norm, B_norm, C_norm = norms or (None, None, None)
    _selective_step_kernel[(triton.cdiv(channels, block_d), triton.cdiv(batch, rows))](
        x, dt, B, C, z, dt_proj, dt_bias, A_log, D, dt_norm, B_norm, C_norm, state, y, active, batch, channels, dstate,
        rank, 0.0 if eps is None else eps, x.stride(0), dt.stride(0), B.stride(0), C.stride(0), z.stride(0),
        NORMED=eps is not None, ROWS=rows, BLOCK_D=block_d, BLOCK_N=triton.next_power_of_2(dstate),
        BLOCK_R=triton.next_power_of_2(rank), PDL=dependent(x.device), num_warps=4, **_pdl(x.device),
    )  # fmt: skip
    return y


def takes_cache(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether `attend_` takes these queries and caches: plain caches, queries of a key head that registers hold."""
    ratio, headdim = q.shape[1] // k_cache.shape[2], q.shape[2]
    if k_cache.dtype != v_cache.dtype or k_cache.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    if k_cache.stride() != v_cache.stride() or k_cache.stride(3) != 1 or k_cache.shape != v_cache.shape:
        return False
    return headdim <= 512 and _at_least_16(ratio) * _at_least_16(headdim) <= 8192 and 0 < len(q) <= 65535


def attend_(
    q: Tensor, k: Tensor | None, v: Tensor | None, k_cache: Tensor, v_cache: Tensor, length: Tensor, scale: float,
    theta: float | None, rope_dim: int | None, mask: Tensor | None = None,
    angles: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Compute `steps.attend_`; heads of q, k and v lie one after the other. The result of several rows is rounded.

    If k and v are None, the caches have them already, at ``length``. Where ``mask (b, capacity)`` is False, nothing is
    read; some place must be. ``angles`` are cosines and sines of each row, ``(b, rope_dim)``, in place of ``theta``.

    The past of each row is cut into equal parts, whose number depends on the capacity, so that a CUDA graph can be
    replayed; where the parts begin depends on ``length``. The kernel before this must not write ``length``.
    """
    batch, nheads, headdim = q.shape
    capacity, nkvheads = k_cache.shape[1:3]
    block_r, block_e = _at_least_16(nheads // nkvheads), _at_least_16(headdim)
    block_s = max(16, CACHE_TILE // block_e)
    processors, shared = device_limits(q.device)
    wanted = min(MOST_SPLITS, SPLIT_PROGRAMS * processors // (batch * nkvheads), triton.cdiv(capacity, block_s))
    splits = 1 << max(0, wanted.bit_length() - 1)
    stages = max(1, min(3, shared // (2 * block_s * block_e * k_cache.element_size()) - 1))
    half = 0 if theta is None and angles is None else (headdim if rope_dim is None else rope_dim) // 2
    cos, sin = angles or (None, None)
    parts = torch.empty(batch, nheads, splits, headdim, dtype=torch.float32, device=q.device)
    sums = torch.empty(batch, nheads, 2, splits, dtype=torch.float32, device=q.device)
    y = torch.empty(batch, nheads * headdim, dtype=q.dtype if batch == 1 else k_cache.dtype, device=q.device)
    consts = {"SPLITS": splits, "BLOCK_S": block_s, "PDL": dependent(q.device)}
    _attend_kernel[(splits, nkvheads, batch)](
        q, k, v, cos, sin, k_cache, v_cache, length, mask, parts, sums, capacity, nkvheads, nheads // nkvheads, headdim,
        scale * math.log2(math.e), q.stride(0), 0 if k is None else k.stride(0), 0 if v is None else v.stride(0),
        0 if cos is None else cos.stride(0), *k_cache.stride()[:3], length.stride(0),
        0 if mask is None else mask.stride(0), **consts, HALF=half,
        RATE=0.0 if theta is None else math.log2(theta) / half, BLOCK_R=block_r, BLOCK_E=block_e, STAGES=stages,
        PRECISION="widen" if INTERPRETED else "ieee", num_warps=8 if k_cache.dtype == torch.float32 else 4,
        **_pdl(q.device),
    )  # fmt: skip
    block_e = min(block_e, max(16, CACHE_TILE // splits))
    _combine_kernel[(triton.cdiv(headdim, block_e), nheads, batch)](
        parts, sums, length, y, nheads, headdim, length.stride(0), **consts, NEW=k is not None, BLOCK_E=block_e,
        num_warps=4, **_pdl(q.device),
    )  # fmt: skip
    return y


def add_norm_(hidden: Tensor, mixed: Tensor | None, weight: Tensor, eps: float, scale: float) -> Tensor:
    """Add ``scale * mixed`` to ``hidden`` in place, and return its RMS norm in the weight's dtype."""
    size = hidden.shape[-1]
    assert hidden.is_contiguous()
    mixed = None if mixed is None else mixed.contiguous()
    normed = torch.empty(hidden.shape, dtype=weight.dtype, device=hidden.device)
    block = triton.next_power_of_2(size)
    _add_norm_kernel[(hidden.numel() // size,)](
        hidden, mixed, weight, normed, size, eps, scale, BLOCK=block, num_warps=min(16, max(1, block // 512))
    )
    return normed


def take(
    logits: Tensor, token: Tensor, tokens: Tensor, count: Tensor, done: Tensor, active: Tensor, stop: Tensor,
    greedy: bool,
) -> None:  # fmt: skip
    """Write down the next token of each row: the likeliest one, or the one in ``token``.

    Args:
        logits: ``(b, vocab)``, float32; float64 in a model of float64.
        token: The token that is read next, ``(b,)``, int64.
        tokens: All tokens, ``(b, room)``, int32; -1 for rows that are done.
        count: Tokens written so far in each row, ``(b,)``, int32.
        done: Rows that have ended, ``(b,)``; a row ends with one of ``stop``.
        active: Gets the rows that read this token.
        stop: Tokens that end a row, padded with -1 to a power of two.
        greedy: Choose the likeliest.
    """
    batch, vocab = logits.shape
    _take_kernel[(batch,)](
        logits, token, tokens, count, done, active, stop, vocab, tokens.shape[1], GREEDY=greedy, NSTOP=len(stop),
        BLOCK=min(8192, triton.next_power_of_2(vocab)), num_warps=16,
    )  # fmt: skip


@cache
def dependent(device: torch.device) -> bool:
    """Whether kernels may start before the one before them has ended."""
    return not INTERPRETED and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


def _pdl(device: torch.device) -> dict[str, Any]:
    return {"launch_pdl": True} if dependent(device) else {}


def _block_k(size: int, most: int) -> int:
    """Return the largest power of two, at most ``most``, that divides a size."""
    return min(most, size & -size)


def _at_least_16(size: int) -> int:
    """Return the power of two that holds a size, and that matrix units take."""
    return max(16, triton.next_power_of_2(size))


def _row_config(size: int) -> tuple[int, int]:
    """Return (BLOCK_O, num_warps) of a product with one row, ``size`` bytes of weights an output.

    A thread holds at most 320 bytes of weights; of 10 shapes tried on an H200 this was the best for 5 KB and 10 KB.
    """
    warps = 2 if size <= 5120 else 4
    return min(4, 1 << max(0, (warps * 32 * 320 // size).bit_length() - 1)), warps


def _ahead_config(nout: int, size: int) -> tuple[int, int, int, int, int]:
    """Return (BLOCK_O, BLOCK_K, stages, warps, warps that share outputs); the best of 7 pairs tried on an H200."""
    return (32, 128, 6, 4, 2) if nout > 2 * size else (16, 256, 5, 2, 1)


@triton.jit
def _finish(
    total, offs_o, offs_b, bias_ptr, factors_ptr, onto_ptr, out_ptr, window_ptr, taps_ptr, taps_bias_ptr, active_ptr,
    nrows, nout, scale, first, channels, WIDTH: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Store a tile ``total (O, B)`` of a product: with its bias, convolved, or added to what is there."""
    mask_o, mask_b = offs_o < nout, offs_b < nrows
    mask = mask_o[:, None] & mask_b[None, :]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + offs_o, mask=mask_o, other=0.0).to(tl.float32)[:, None]
    total *= scale
    if factors_ptr is not None:
        total *= tl.load(factors_ptr + offs_o, mask=mask_o, other=0.0).to(tl.float32)[:, None]
    if window_ptr is not None:
        channel = offs_o - first
        inside = (channel >= 0) & (channel < channels) & mask_o
        moved = inside[:, None] & mask_b[None, :]
        if active_ptr is not None:
            moved = moved & (tl.load(active_ptr + offs_b, mask=mask_b, other=0) != 0)[None, :]
        taps = taps_ptr + channel * WIDTH
        rows = window_ptr + (offs_b.to(tl.int64)[None, :] * channels + channel[:, None]) * APART
        past = ()  # type: Any
        for j in tl.static_range(WIDTH - 1):
            past += (tl.load(rows + j, mask=inside[:, None] & mask_b[None, :], other=0.0),)
        y = total * tl.load(taps + WIDTH - 1, mask=inside, other=0.0).to(tl.float32)[:, None]
        for j in tl.static_range(WIDTH - 1):
            y += past[j].to(tl.float32) * tl.load(taps + j, mask=inside, other=0.0).to(tl.float32)[:, None]
        if taps_bias_ptr is not None:
            y += tl.load(taps_bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)[:, None]
        tl.debug_barrier()  # every thread has read the window
        for j in tl.static_range(WIDTH - 2):
            tl.store(rows + j, past[j + 1], mask=moved)
        if WIDTH > 1:
            tl.store(rows + WIDTH - 2, total.to(window_ptr.dtype.element_ty), mask=moved)
        total = tl.where(inside[:, None], silu(y), total)
    places = offs_b.to(tl.int64)[None, :] * nout + offs_o[:, None]
    if onto_ptr is not None:
        total += tl.load(onto_ptr + places, mask=mask, other=0.0).to(tl.float32)
        tl.debug_barrier()  # every thread has read it: the result may go to the same place
    tl.store(out_ptr + places, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _project_row_kernel(
    x_ptr, weight_ptr, bias_ptr, factors_ptr, norm_ptr, onto_ptr, out_ptr, window_ptr, taps_ptr, taps_bias_ptr,
    active_ptr, nrows, nout, stride_x, eps, scale, first, channels,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, APART: tl.constexpr, PDL: tl.constexpr, BLOCK_O: tl.constexpr,
    GROUP: tl.constexpr, GATED: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of outputs): a program owns BLOCK_O outputs of one row, and asks for all their weights at once.

    Weights are read once. They must not push x and its norm, which all programs read, out of the first-level cache.
    """
    offs_o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    offs_k = tl.arange(0, BLOCK_K)
    mask_o = offs_o < nout
    rows = weight_ptr + offs_o.to(tl.int64)[:, None] * SIZE
    PARTS: tl.constexpr = (GROUP + BLOCK_K - 1) // BLOCK_K
    weights = ()  # type: Any
    for i in tl.static_range(SIZE // GROUP * PARTS):
        offs = i // PARTS * GROUP + i % PARTS * BLOCK_K + offs_k
        mask = mask_o[:, None] & (offs < SIZE)[None, :]
        weights += (tl.load(rows + offs[None, :], mask=mask, other=0.0, eviction_policy="evict_first"),)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((BLOCK_O,), tl.float32)
    for group in tl.static_range(SIZE // GROUP):
        acc = tl.zeros((BLOCK_O, BLOCK_K), tl.float32)
        squares = tl.zeros((BLOCK_K,), tl.float32)
        for i in tl.static_range(PARTS):
            offs = group * GROUP + i * BLOCK_K + offs_k
            mask_k = offs < SIZE
            x = tl.load(x_ptr + offs, mask=mask_k, other=0.0, eviction_policy="evict_last").to(tl.float32)
            if GATED:
                x = silu(x) * tl.load(x_ptr + SIZE + offs, mask=mask_k, other=0.0).to(tl.float32)
            if norm_ptr is not None:
                squares += x * x
                x *= tl.load(norm_ptr + offs, mask=mask_k, other=0.0, eviction_policy="evict_last").to(tl.float32)
            acc += weights[group * PARTS + i].to(tl.float32) * x[None, :]
        part = tl.sum(acc, axis=1)
        if norm_ptr is not None:
            part *= tl.rsqrt(tl.sum(squares) / GROUP + eps)
        total += part
    _finish(total[:, None], offs_o, tl.arange(0, 1), bias_ptr, factors_ptr, onto_ptr, out_ptr, window_ptr, taps_ptr,
            taps_bias_ptr, active_ptr, nrows, nout, scale, first, channels, WIDTH, APART)  # fmt: skip


@triton.jit
def _project_rows_kernel(
    x_ptr, weight_ptr, bias_ptr, factors_ptr, norm_ptr, onto_ptr, out_ptr, window_ptr, taps_ptr, taps_bias_ptr,
    active_ptr, nrows, nout, stride_x, eps, scale, first, channels,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, APART: tl.constexpr, PDL: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of outputs): a program owns BLOCK_O outputs of all rows; x has the weight's dtype."""
    offs_o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    offs_b = tl.arange(0, BLOCK_B)
    mask_o, mask_b = offs_o < nout, offs_b < nrows
    weight_rows = weight_ptr + offs_o.to(tl.int64)[:, None] * SIZE
    x_rows = x_ptr + offs_b.to(tl.int64)[:, None] * stride_x
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((BLOCK_O, BLOCK_B), tl.float32)
    for k in tl.range(0, SIZE, BLOCK_K, num_stages=STAGES):
        offs = k + tl.arange(0, BLOCK_K)
        mask_k = offs < SIZE
        weight = tl.load(weight_rows + offs[None, :], mask=mask_o[:, None] & mask_k[None, :], other=0.0)
        x = tl.load(x_rows + offs[None, :], mask=mask_b[:, None] & mask_k[None, :], other=0.0)
        total = dot(weight, tl.trans(x), total, PRECISION)
    _finish(total, offs_o, offs_b, bias_ptr, factors_ptr, onto_ptr, out_ptr, window_ptr, taps_ptr, taps_bias_ptr,
            active_ptr, nrows, nout, scale, first, channels, WIDTH, APART)  # fmt: skip


@triton.jit
def _prepare_kernel(
    x_ptr, norm_ptr, y_ptr, stride_x, size, group, eps, offset, GATED: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, groups)."""
    row = tl.program_id(0).to(tl.int64)
    inside = tl.arange(0, BLOCK)
    mask = inside < group
    offs = tl.program_id(1) * group + inside
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row * stride_x + offs, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        x = silu(x) * tl.load(x_ptr + row * stride_x + size + offs, mask=mask, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        weight = tl.load(norm_ptr + offs, mask=mask, other=0.0).to(tl.float32) + offset
        x *= tl.rsqrt(tl.sum(x * x) / group + eps) * weight
    tl.store(y_ptr + row * size + offs, x.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _ssd_step_kernel(
    x_ptr, dt_ptr, A_log_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, state_ptr, y_ptr, active_ptr,
    nheads, ngroups, headdim, dstate, dt_min, dt_max, stride_x, stride_dt, stride_B, stride_C, stride_z,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of head channels, heads, batch): a program owns BLOCK_P channels of one head of one row."""
    offs_p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    offs_n = tl.arange(0, BLOCK_N)
    pid_h, pid_b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    pid_g = pid_h // (nheads // ngroups)
    mask_p, mask_n = offs_p < headdim, offs_n < dstate
    mask = mask_p[:, None] & mask_n[None, :]
    places = state_ptr + ((pid_b * nheads + pid_h) * headdim + offs_p[:, None]) * dstate + offs_n[None, :]
    state = tl.load(places, mask=mask, other=0.0).to(tl.float32)
    A = -tl.exp(tl.load(A_log_ptr + pid_h).to(tl.float32)) * LOG2E
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    step = tl.load(dt_ptr + pid_b * stride_dt + pid_h).to(tl.float32) + tl.load(dt_bias_ptr + pid_h).to(tl.float32)
    step = clip(softplus(step), dt_min, dt_max)
    at = pid_h * headdim + offs_p
    x = tl.load(x_ptr + pid_b * stride_x + at, mask=mask_p, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + pid_b * stride_z + at, mask=mask_p, other=0.0).to(tl.float32)
    B = tl.load(B_ptr + pid_b * stride_B + pid_g * dstate + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    C = tl.load(C_ptr + pid_b * stride_C + pid_g * dstate + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    state = state * exp2(step * A) + (x * step)[:, None] * B[None, :]
    y = tl.sum(state * C[None, :], axis=1) + tl.load(D_ptr + pid_h).to(tl.float32) * x
    tl.store(y_ptr + pid_b * nheads * headdim + at, y * silu(z), mask=mask_p)
    if active_ptr is not None:
        mask = mask & (tl.load(active_ptr + pid_b + offs_p * 0) != 0)[:, None]  # the interpreter takes no scalar
    tl.store(places, state.to(state_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _selective_step_kernel(
    x_ptr, dt_ptr, B_ptr, C_ptr, z_ptr, dt_proj_ptr, dt_bias_ptr, A_log_ptr, D_ptr, dt_norm_ptr, B_norm_ptr, C_norm_ptr,
    state_ptr, y_ptr, active_ptr, nrows, channels, dstate, rank, eps, stride_x, stride_dt, stride_B, stride_C, stride_z,
    NORMED: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of channels, blocks of rows): a program owns BLOCK_D channels of ROWS rows, and their step sizes."""
    offs_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    offs_n, offs_r = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R)
    first = tl.program_id(1).to(tl.int64) * ROWS
    mask_d, mask_n, mask_r = offs_d < channels, offs_n < dstate, offs_r < rank
    mask = mask_d[:, None] & mask_n[None, :]
    inside = offs_d.to(tl.int64)[:, None] * dstate + offs_n[None, :]
    states = ()  # type: Any
    for i in tl.static_range(ROWS):
        places = state_ptr + (first + i) * channels * dstate + inside
        states += (tl.load(places, mask=mask & (first + i + inside * 0 < nrows), other=0.0),)
    weights = tl.load(
        dt_proj_ptr + offs_d.to(tl.int64)[:, None] * rank + offs_r[None, :],
        mask=mask_d[:, None] & mask_r[None, :], other=0.0,
    ).to(tl.float32)  # fmt: skip
    A = -tl.exp(tl.load(A_log_ptr + inside, mask=mask, other=0.0).to(tl.float32)) * LOG2E
    bias = tl.load(dt_bias_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    D = tl.load(D_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for i in tl.static_range(ROWS):
        row = first + i
        live = row + offs_d * 0 < nrows  # the interpreter takes no scalar
        mask_x = mask_d & live
        dt = tl.load(dt_ptr + row * stride_dt + offs_r, mask=mask_r & (row + offs_r * 0 < nrows), other=0.0)
        mask_row = mask_n & (row + offs_n * 0 < nrows)
        B = tl.load(B_ptr + row * stride_B + offs_n, mask=mask_row, other=0.0).to(tl.float32)
        C = tl.load(C_ptr + row * stride_C + offs_n, mask=mask_row, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * stride_x + offs_d, mask=mask_x, other=0.0).to(tl.float32)
        z = tl.load(z_ptr + row * stride_z + offs_d, mask=mask_x, other=0.0).to(tl.float32)
        dt = dt.to(tl.float32)
        if NORMED:
            dt = _normed(dt, dt_norm_ptr, offs_r, rank, eps)
            B = _normed(B, B_norm_ptr, offs_n, dstate, eps)
            C = _normed(C, C_norm_ptr, offs_n, dstate, eps)
        step = softplus(tl.sum(weights * dt[None, :], axis=1) + bias)
        state = states[i].to(tl.float32) * exp2(step[:, None] * A) + (x * step)[:, None] * B[None, :]
        y = tl.sum(state * C[None, :], axis=1) + D * x
        tl.store(y_ptr + row * channels + offs_d, y * silu(z), mask=mask_x)
        if active_ptr is not None:
            live = live & (tl.load(active_ptr + row + offs_d * 0, mask=live, other=0) != 0)
        places = state_ptr + row * channels * dstate + inside
        tl.store(places, state.to(state_ptr.dtype.element_ty), mask=mask & live[:, None])


@triton.jit
def _normed(x, weight_ptr, offs, size, eps):
    """Return the RMS norm of the first ``size`` values of x, whose others are zeros."""
    x *= tl.rsqrt(tl.sum(x * x) / size + eps)
    if weight_ptr is not None:
        x *= tl.load(weight_ptr + offs, mask=offs < size, other=0.0).to(tl.float32)
    return x


@triton.jit
def _attend_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, k_cache_ptr, v_cache_ptr, length_ptr, mask_ptr, parts_ptr, sums_ptr,
    capacity, nkvheads, ratio, headdim, scale, stride_q, stride_k, stride_v, stride_angles, stride_b, stride_s,
    stride_g, stride_length, stride_mask,
    SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, PDL: tl.constexpr, HALF: tl.constexpr, RATE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (parts of the past, key heads, rows): a program owns what a key head's queries read of one part.

    The first part has the new token as well: it reads it from k and v, and writes it. So no program reads what another
    one writes. Without k and v the new token is the last one of the past. ``scale`` is that of base-2 logarithms.
    """
    split, pid_g, pid_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    offs_r = tl.arange(0, BLOCK_R)
    offs_e = tl.arange(0, BLOCK_E)[None, :]
    mask_e = offs_e < headdim
    past = tl.load(length_ptr + pid_b * stride_length).to(tl.int32)
    if k_ptr is None:
        past += 1
    size = _part_size(past, SPLITS, BLOCK_S)
    begin = tl.minimum(split * size, past)
    end = tl.minimum(begin + size, past)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    q_rows = q_ptr + pid_b * stride_q + (pid_g * ratio + offs_r)[:, None] * headdim
    mask_q = (offs_r < ratio)[:, None] & mask_e
    turn = pid_b * stride_angles
    q = _load_rotated(q_rows, cos_ptr, sin_ptr, turn, offs_e, mask_q, past, HALF, RATE)
    q = q.to(k_cache_ptr.dtype.element_ty)
    keys = k_cache_ptr + pid_b * stride_b + pid_g * stride_g
    values = v_cache_ptr + pid_b * stride_b + pid_g * stride_g
    most = tl.full((BLOCK_R,), LEAST, tl.float32)
    total = tl.zeros((BLOCK_R,), tl.float32)
    acc = tl.zeros((BLOCK_R, BLOCK_E), tl.float32)
    first = split + offs_r * 0 == 0
    if k_ptr is not None:
        mask_new = mask_e & (split + offs_e * 0 == 0)  # the interpreter takes no scalar
        k_row = k_ptr + pid_b * stride_k + pid_g * headdim
        k = _load_rotated(k_row, cos_ptr, sin_ptr, turn, offs_e, mask_new, past, HALF, RATE)
        v = tl.load(v_ptr + pid_b * stride_v + pid_g * headdim + offs_e, mask=mask_new, other=0.0)
        k, v = k.to(k_cache_ptr.dtype.element_ty), v.to(v_cache_ptr.dtype.element_ty)
        place = past.to(tl.int64) * stride_s + offs_e
        room = mask_new & (past + offs_e * 0 < capacity)
        tl.store(keys + place, k, mask=room)
        tl.store(values + place, v, mask=room)
        most = tl.where(first, tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1) * scale, LEAST)
        total = tl.where(first, 1.0, 0.0)
        acc += v.to(tl.float32)
    for start in tl.range(begin, end, BLOCK_S, num_stages=STAGES):
        offs_s = start + tl.arange(0, BLOCK_S)
        mask = (offs_s < end)[:, None] & mask_e
        places = offs_s.to(tl.int64)[:, None] * stride_s + offs_e
        key = tl.load(keys + places, mask=mask, other=0.0)
        value = tl.load(values + places, mask=mask, other=0.0)
        scores = dot(q, tl.trans(key), None, PRECISION) * scale
        seen = offs_s < end
        if mask_ptr is not None:
            seen = tl.load(mask_ptr + pid_b * stride_mask + offs_s, mask=seen, other=0) != 0
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, axis=1))
        shares = exp2(scores - higher[:, None])
        fade = exp2(most - higher)
        total = total * fade + tl.sum(shares, axis=1)
        acc = dot(shares.to(value.dtype), value, acc * fade[:, None], PRECISION)
        most = higher

    live = (offs_r < ratio) & (first | (begin + offs_r * 0 < past))
    heads = (pid_b * nkvheads + pid_g) * ratio + offs_r
    tl.store(sums_ptr + heads * (2 * SPLITS) + split, most, mask=live)
    tl.store(sums_ptr + heads * (2 * SPLITS) + SPLITS + split, total, mask=live)
    tl.store(parts_ptr + (heads * SPLITS + split)[:, None] * headdim + offs_e, acc, mask=live[:, None] & mask_e)


@triton.jit
def _combine_kernel(
    parts_ptr, sums_ptr, length_ptr, y_ptr, nheads, headdim, stride_length, SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr, PDL: tl.constexpr, NEW: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of a head, heads, rows): join what the parts of the past gave."""
    head = tl.program_id(2).to(tl.int64) * nheads + tl.program_id(1)
    offs_p = tl.arange(0, SPLITS)
    offs_e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    past = tl.load(length_ptr + tl.program_id(2) * stride_length).to(tl.int32)
    if not NEW:
        past += 1
    live = (offs_p == 0) | (offs_p * _part_size(past, SPLITS, BLOCK_S) < past)
    mask_e = offs_e < headdim
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    most = tl.load(sums_ptr + head * (2 * SPLITS) + offs_p, mask=live, other=LEAST)
    total = tl.load(sums_ptr + head * (2 * SPLITS) + SPLITS + offs_p, mask=live, other=0.0)
    places = (head * SPLITS + offs_p)[:, None] * headdim + offs_e[None, :]
    parts = tl.load(parts_ptr + places, mask=live[:, None] & mask_e[None, :], other=0.0)
    weight = exp2(most - tl.max(most, axis=0))
    y = tl.sum(parts * weight[:, None], axis=0) / tl.sum(total * weight, axis=0)
    tl.store(y_ptr + head * headdim + offs_e, y.to(y_ptr.dtype.element_ty), mask=mask_e)


@triton.jit
def _part_size(past, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr):
    """Return how much of the past is in a part, in whole tiles; at least one."""
    return tl.maximum(tl.cdiv(past, SPLITS * BLOCK_S), 1) * BLOCK_S


@triton.jit
def _load_rotated(head_ptr, cos_ptr, sin_ptr, turn, offs, mask, position, HALF: tl.constexpr, RATE: tl.constexpr):
    """Load heads in float32, the halves of their first 2 HALF numbers rotated: `layers.rotate`, or by given angles."""
    x = tl.load(head_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if HALF > 0:
        low, rotated = offs < HALF, offs < 2 * HALF
        across = tl.where(low, offs + HALF, offs - HALF)
        partner = tl.load(head_ptr + across, mask=mask & rotated, other=0.0).to(tl.float32)
        if cos_ptr is not None:
            cos = tl.load(cos_ptr + turn + offs, mask=rotated, other=1.0).to(tl.float32)
            sin = tl.load(sin_ptr + turn + offs, mask=rotated, other=0.0).to(tl.float32)
        else:
            place = tl.where(low, offs, offs - HALF).to(tl.float64)
            frequency = tl.exp2(place * tl.full((1, 1), -RATE, tl.float64)).to(tl.float32)
            angle = tl.where(rotated, position.to(tl.float32) * frequency, 0.0)
            cos = tl.cos(angle)
            sin = tl.sin(angle)
        x = x * cos + tl.where(low, -partner, partner) * sin
    return x


@triton.jit
def _add_norm_kernel(hidden_ptr, mixed_ptr, weight_ptr, normed_ptr, size, eps, scale, BLOCK: tl.constexpr):
    """Grid (tokens): reads and writes the stream once."""
    row = tl.program_id(0).to(tl.int64) * size
    offs = tl.arange(0, BLOCK)
    mask = offs < size
    x = tl.load(hidden_ptr + row + offs, mask=mask, other=0.0)
    if mixed_ptr is not None:
        x += scale * tl.load(mixed_ptr + row + offs, mask=mask, other=0.0).to(tl.float32)
        tl.store(hidden_ptr + row + offs, x, mask=mask)
    x *= tl.rsqrt(tl.sum(x * x) / size + eps)
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(normed_ptr + row + offs, (x * weight).to(normed_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _take_kernel(
    logits_ptr, token_ptr, tokens_ptr, count_ptr, done_ptr, active_ptr, stop_ptr, vocab, room,
    GREEDY: tl.constexpr, NSTOP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows). Of equal logits the first counts, as in PyTorch."""
    row = tl.program_id(0).to(tl.int64)
    if GREEDY:
        best = tl.full((BLOCK,), float("-inf"), logits_ptr.dtype.element_ty)
        place = tl.zeros((BLOCK,), tl.int32)
        for begin in range(0, vocab, BLOCK):
            offs = begin + tl.arange(0, BLOCK)
            values = tl.load(logits_ptr + row * vocab + offs, mask=offs < vocab, other=float("-inf"))
            better = values > best
            best = tl.where(better, values, best)
            place = tl.where(better, offs, place)
        highest = tl.max(best)
        token = tl.min(tl.where(best == highest, place, vocab - 1))
    else:
        token = tl.load(token_ptr + row).to(tl.int32)
    count = tl.load(count_ptr + row)
    done = tl.load(done_ptr + row) != 0
    ends = tl.sum((tl.load(stop_ptr + tl.arange(0, NSTOP)) == token).to(tl.int32)) > 0
    tl.debug_barrier()
    tl.store(tokens_ptr + row * room + count, tl.where(done, -1, token))
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(count_ptr + row, count + 1)
    tl.store(active_ptr + row, done == 0)
    tl.store(done_ptr + row, done | ends)
