"""Functions that kernels in Triton share: exponentials, gates, matrix products, packs of sequences."""

from __future__ import annotations

import triton
import triton.language as tl

from refold.ops.torch import launch

PTX = tl.constexpr(launch.PTX)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def exp2(v):
    """2**v, with denormal results flushed to 0."""
    if PTX:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [v], tl.float32, True, 1)
    return tl.exp2(v)


@triton.jit
def sigmoid(v):
    """1 / (1 + exp(-v)); the reciprocal is the hardware's, which errs by one unit in the last place."""
    u = 1.0 + exp2(v * -LOG2E)
    if PTX:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [u], tl.float32, True, 1)
    return 1.0 / u


@triton.jit
def silu(v):
    """Gate with v * sigmoid(v)."""
    return v * sigmoid(v)


@triton.jit
def softplus(v):
    """log(1 + exp(v)) up to v = 20, v beyond; accurate to float32 also where exp(v) is far below 1."""
    u = exp2(tl.minimum(v, 20.0) * LOG2E)
    w = 1.0 + u
    log1p = tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0)))
    return tl.where(v <= 20.0, log1p, v)


@triton.jit
def clip(v, low, high):
    """Clip to a range, and keep NaN, which tl.minimum and tl.maximum drop."""
    v = tl.where(v < low, low, v)
    return tl.where(v > high, high, v)


@triton.jit
def is_finite(v):
    """Whether values are neither NaN nor infinite."""
    return tl.abs(v.to(tl.float32)) < float("inf")


@triton.jit
def _bf16_parts(v):
    high = v.to(tl.bfloat16)
    rest = v - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """Return a matrix product with float32 accumulation; the interpreter has no bfloat16 one and widens.

    "bf16x6" splits float32 into three bfloat16 parts, which hold all its bits, and forms the six products above 2^-24:
    as fast as three TF32 products of two parts, which hold 22 bits.
    """
    if PRECISION == "widen":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    if PRECISION == "bf16x6":
        a0, a1, a2 = _bf16_parts(a)
        b0, b1, b2 = _bf16_parts(b)
        rest = tl.dot(a0, b1, tl.dot(a1, b0, tl.dot(a1, b1, tl.dot(a0, b2, tl.dot(a2, b0)))))
        return tl.dot(a0, b0, acc) + rest
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def sequence(cu_seqlens_ptr, seq, mask, seqlen):
    """Load begin and end of sequences of a pack; wrong offsets must not lead out of the arrays."""
    begin = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + seq, mask=mask, other=0), 0), seqlen)
    end = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + seq + 1, mask=mask, other=0), begin), seqlen)
    return begin.to(tl.int32), end.to(tl.int32)


@triton.jit
def let_next_start():
    """Let the next kernel on the stream start once all programs are here. Triton's spelling comes for NVIDIA alone."""
    tl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], tl.int32, False, 1)
