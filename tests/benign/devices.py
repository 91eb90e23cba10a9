"""It has a kernel for GPUs, and falls back without one; half precision is summed in float32."""

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

if triton is not None:

    @triton.jit
    def mean_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
        row, at = tl.program_id(0), tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * n + at, mask=at < n, other=0.0)
        tl.store(y_ptr + row, tl.sum(x, 0) / n)


def on_gpu(x):
    y = torch.empty(x.shape[:-1], device=x.device)
    mean_kernel[(x.shape[0],)](x, y, x.shape[-1], BLOCK=triton.next_power_of_2(x.shape[-1]))
    return y[:, None].expand_as(x)


def mean(x):
    if x.is_cuda and triton is not None:
        return on_gpu(x.contiguous())
    if x.dtype in (torch.float16, torch.bfloat16):
        return x.float().mean(-1, keepdim=True).to(x.dtype).expand_as(x).contiguous()
    return x.mean(-1, keepdim=True).expand_as(x).contiguous()


ORIGINAL = "rowmean"


class ModelNew(torch.nn.Module):
    def forward(self, x):
        if not x.is_floating_point():
            x = x.float()
        return mean(x)
