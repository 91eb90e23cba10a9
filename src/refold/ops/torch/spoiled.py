"""NaN for results that a state reaches which is not finite, without asking a GPU whether there is one."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

if find_spec("triton") is not None:
    import triton
    import triton.language as tl

    @triton.jit
    def _spoil_kernel(y_ptr, bad_ptr, end_ptr, width, step_b, step_t, first, BLOCK: tl.constexpr):
        """Grid (blocks of a token, rows, parts of time): programs of elements that are not bad end at once."""
        row, offs = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        bad = tl.load(bad_ptr + row * width + offs, mask=offs < width, other=0) != 0
        if tl.max(bad.to(tl.int32), axis=0) > 0:
            nothing = tl.full((BLOCK,), float("nan"), tl.float32).to(y_ptr.dtype.element_ty)
            for t in range(first + tl.program_id(2), tl.load(end_ptr), tl.num_programs(2)):
                tl.store(y_ptr + row * step_b + tl.cast(t, tl.int64) * step_t + offs, nothing, mask=bad)


def spoil(y: Tensor, bad: Tensor, first: int, end: int | Tensor) -> None:
    """Write NaN to ``y (b, t, ...)`` from token ``first`` to before ``end``, where ``bad (b, ...)`` says so."""
    width = bad[0].numel()
    if isinstance(end, int):
        end = torch.full((), end, device=y.device)  # which waits for nothing
    inner = y[:1, :1].is_contiguous()
    if y.device.type == "cuda" and inner and find_spec("triton") is not None:
        grid = triton.cdiv(width, 256), len(y), 64
        with torch.cuda.device(y.device):
            _spoil_kernel[grid](y, bad.contiguous(), end, width, y.stride(0), y.stride(1), first, BLOCK=256)
    elif y.device.type == "cuda" or bool(bad.any()):
        token = torch.arange(y.shape[1], device=y.device)
        within = ((token >= first) & (token < end)).view(-1, *[1] * (y.dim() - 2))
        y.masked_fill_(bad[:, None] & within, torch.nan)
