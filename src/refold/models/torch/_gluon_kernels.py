"""Products of up to 16 rows on NVIDIA GPUs from Hopper on, with weights that are requested ahead of time.

As in `kernels._project_rows_kernel`, a program owns BLOCK_O outputs of all rows. Copies to shared memory are
asynchronous, STAGES - 1 tiles ahead. The first weights, and the windows of the convolution, do not come from the kernel
before this one. So they are requested before the wait for that kernel, and arrive while it ends. The loop over tiles is
unrolled. Otherwise each tile spends more instructions on its place in the ring and on masks than on the product.
"""

from __future__ import annotations

from typing import Any  # noqa: F401 - in type comments

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from refold.ops.triton.gluon import append, async_load, silu


@gluon.jit
def _project_rows_ahead_kernel(
    x_ptr, weight_ptr, bias_ptr, factors_ptr, onto_ptr, out_ptr, window_ptr, taps_ptr, taps_bias_ptr, active_ptr,
    nrows, nout, stride_x, scale, first, channels,
    SIZE: gl.constexpr, WIDTH: gl.constexpr, APART: gl.constexpr, BLOCK_O: gl.constexpr, BLOCK_B: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, DOWN: gl.constexpr,
):  # fmt: skip
    """Grid (blocks of outputs). DOWN warps share the outputs of a program, the others its rows."""
    WARPS: gl.constexpr = gl.num_warps()
    COUNT: gl.constexpr = (SIZE + BLOCK_K - 1) // BLOCK_K
    AHEAD: gl.constexpr = STAGES - 1
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [DOWN, WARPS // DOWN], [16, 8])
    # Columns of 16 bytes, neighbouring rows in other banks.
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    # Tiles of one array would count as one: a copy to any of them would wait until all threads have read any other.
    weights = ()  # type: Any
    xs = ()  # type: Any
    for _ in gl.static_range(STAGES):
        weights = append(weights, gl.allocate_shared_memory(weight_ptr.dtype.element_ty, [BLOCK_O, BLOCK_K], swizzled))
        xs = append(xs, gl.allocate_shared_memory(x_ptr.dtype.element_ty, [BLOCK_B, BLOCK_K], swizzled))
    begin = gl.program_id(0) * BLOCK_O
    offs_o = begin + gl.arange(0, BLOCK_O, layout=gl.SliceLayout(1, mma))
    offs_b = gl.arange(0, BLOCK_B, layout=gl.SliceLayout(0, mma))
    mask_o, mask_b = offs_o < nout, offs_b < nrows
    mask = mask_o[:, None] & mask_b[None, :]
    places = offs_b.to(gl.int64)[None, :] * nout + offs_o[:, None]

    # A thread copies 16 bytes at a time. Outputs after the last one repeat it, and are not stored.
    lanes: gl.constexpr = min(32, BLOCK_K // 8)
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [WARPS, 1], [1, 0])
    offs_k = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, rows))[None, :]
    row_o = gl.minimum(begin + gl.arange(0, BLOCK_O, layout=gl.SliceLayout(1, rows)), nout - 1)[:, None]
    row_b = gl.arange(0, BLOCK_B, layout=gl.SliceLayout(1, rows))[:, None]
    weight_tile = weight_ptr + row_o.to(gl.int64) * SIZE + offs_k
    x_tile = x_ptr + row_b * stride_x + offs_k

    gdc_launch_dependents()
    for k in gl.static_range(AHEAD):
        async_load(weights[k], weight_tile + k * BLOCK_K, mask=offs_k < SIZE - k * BLOCK_K)
        async_copy.commit_group()
    channel = offs_o - first
    inside = (channel >= 0) & (channel < channels) & mask_o
    moved = inside[:, None] & mask_b[None, :]
    past = ()  # type: Any
    taps = ()  # type: Any
    if window_ptr is not None:
        window = window_ptr + (offs_b.to(gl.int64)[None, :] * channels + channel[:, None]) * APART
        for j in gl.static_range(WIDTH - 1):
            past = append(past, gl.load(window + j, mask=moved, other=0.0))
        for j in gl.static_range(WIDTH):
            taps = append(taps, gl.load(taps_ptr + channel * WIDTH + j, mask=inside, other=0.0).to(gl.float32))
        if taps_bias_ptr is not None:
            taps_bias = gl.load(taps_bias_ptr + channel, mask=inside, other=0.0).to(gl.float32)
    gdc_wait()
    for k in gl.static_range(AHEAD):
        async_load(xs[k], x_tile + k * BLOCK_K, mask=(row_b < nrows) & (offs_k < SIZE - k * BLOCK_K))
        async_copy.commit_group()
    if onto_ptr is not None:
        before = gl.load(onto_ptr + places, mask=mask, other=0.0).to(gl.float32)
    if active_ptr is not None:
        moved = moved & (gl.load(active_ptr + offs_b, mask=mask_b, other=0) != 0)[None, :]

    total = gl.zeros([BLOCK_O, BLOCK_B], gl.float32, layout=mma)
    for k in gl.static_range(COUNT):
        async_copy.wait_group(AHEAD - 1)
        if k + AHEAD < COUNT:
            then = (k + AHEAD) * BLOCK_K
            left = offs_k < SIZE - then
            async_load(weights[(k + AHEAD) % STAGES], weight_tile + then, mask=left)
            async_load(xs[(k + AHEAD) % STAGES], x_tile + then, mask=(row_b < nrows) & left)
        async_copy.commit_group()
        a = weights[k % STAGES].load(gl.DotOperandLayout(0, mma, 2))
        b = xs[k % STAGES].permute((1, 0)).load(gl.DotOperandLayout(1, mma, 2))
        total = mma_v2(a, b, total)

    if bias_ptr is not None:
        total += gl.load(bias_ptr + offs_o, mask=mask_o, other=0.0).to(gl.float32)[:, None]
    total *= scale
    if factors_ptr is not None:
        total *= gl.load(factors_ptr + offs_o, mask=mask_o, other=0.0).to(gl.float32)[:, None]
    if window_ptr is not None:
        y = total * taps[WIDTH - 1][:, None]
        for j in gl.static_range(WIDTH - 1):
            y += past[j].to(gl.float32) * taps[j][:, None]
        if taps_bias_ptr is not None:
            y += taps_bias[:, None]
        for j in gl.static_range(WIDTH - 2):
            gl.store(window + j, past[j + 1], mask=moved)
        if WIDTH > 1:
            gl.store(window + (WIDTH - 2), total.to(window_ptr.dtype.element_ty), mask=moved)
        total = gl.where(inside[:, None], silu(y), total)
    if onto_ptr is not None:
        total = before + total
    gl.store(out_ptr + places, total.to(out_ptr.dtype.element_ty), mask=mask)
