"""Functions that kernels in Gluon share, and names that differ between versions of Triton (3.6 and 3.9 at hand)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

async_load = getattr(async_copy, "async_load", async_copy.async_copy_global_to_shared)
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def exp2(v):
    """2**v, with denormal results flushed to 0."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [v], gl.float32, True, 1)


@gluon.jit
def reciprocal(v):
    """1 / v by the hardware, which errs by one unit in the last place."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [v], gl.float32, True, 1)


@gluon.jit
def sigmoid(v):
    """1 / (1 + exp(-v))."""
    return reciprocal(1.0 + exp2(v * -1.4426950408889634))


@gluon.jit
def silu(v):
    """Gate with v * sigmoid(v), by the hardware's reciprocal."""
    return v * sigmoid(v)


@gluon.jit
def softplus(v):
    """log(1 + exp(v)) to 1.4e-7, relative: max(v, 0) + log1p(w) with w = exp(-|v|) in (0, 1].

    log1p(w) / w is a minimax polynomial: one special function, not three. Special functions
    limit the speed of this kernel.
    """
    w = exp2(gl.abs(v) * -1.4426950408889634)
    p = 0.019851261749863625 - 0.0032439809292554855 * w
    p = p * w - 0.056959159672260284
    p = p * w + 0.10603617131710052
    p = p * w - 0.15305569767951965
    p = p * w + 0.19675931334495544
    p = p * w - 0.24954132735729218
    p = p * w + 0.3332996368408203
    p = p * w - 0.4999990165233612
    p = p * w + 1.0
    return p * w + gl.maximum(v, 0.0)


@gluon.jit
def seen_as(tile, layout: gl.constexpr = None, dtype: gl.constexpr = None, shape: gl.constexpr = None):
    """Return the same shared memory under another layout, of elements of another type as wide, in another shape."""
    to_layout: gl.constexpr = tile.layout if layout is None else layout
    to_dtype: gl.constexpr = tile.dtype if dtype is None else dtype
    to_shape: gl.constexpr = tile.shape if shape is None else shape
    if _REINTERPRET:
        return tile.reinterpret(to_dtype, to_shape, to_layout)
    else:
        return tile._reinterpret(to_dtype, to_shape, to_layout)


@gluon.jit
def offset(cu_seqlens_ptr, i, seqlen):
    """Return an offset of packed sequences, inside of the array whatever it holds."""
    return gl.minimum(gl.maximum(gl.load(cu_seqlens_ptr + i).to(gl.int32), 0), seqlen)


@gluon.jit
def append(values, value):
    """Append to a tuple."""
    return values + (value,)  # noqa: RUF005


@gluon.jit
def copy(tile, row, stride, columns, live):
    """Start copying rows of global memory into a tile; zeros from row ``live`` and column ``columns`` on."""
    wide: gl.constexpr = min(tile.shape[1], 128 // tile.dtype.primitive_bitwidth)
    lanes: gl.constexpr = min(32, tile.shape[1] // wide)
    layout: gl.constexpr = gl.BlockedLayout([1, wide], [32 // lanes, lanes], [gl.num_warps(), 1], [1, 0])
    offs_t = gl.arange(0, tile.shape[0], layout=gl.SliceLayout(1, layout))
    offs_c = gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, layout))
    mask = (offs_t < live)[:, None] & (offs_c < columns)[None, :]
    async_load(tile, row + (offs_t * stride)[:, None] + offs_c[None, :], mask=mask)
