"""A textbook Mamba-2 layer, written the way one writes it first: broadcast, multiply, sum.

KernelBench convention: ``Model``, ``get_inputs()``, ``get_init_inputs()``. Nothing here knows of
refold. Try ``refold explain examples/naive_mamba2.py`` and ``refold optimize examples/naive_mamba2.py``.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


def segment_sum(log_decay):
    """Return s[..., i, j] = sum of log_decay over j < k <= i, and -inf above the diagonal."""
    length = log_decay.shape[-1]
    x = log_decay[..., None].expand(*log_decay.shape, length)
    below = torch.tril(torch.ones(length, length, dtype=torch.bool, device=x.device), -1)
    on = torch.tril(torch.ones(length, length, dtype=torch.bool, device=x.device))
    return x.masked_fill(~below, 0).cumsum(-2).masked_fill(~on, float("-inf"))


class Model(nn.Module):
    """One Mamba-2 layer: projection, causal convolution, chunked state space dual scan, gated norm."""

    def __init__(self, hidden=768, heads=24, head_dim=64, state=128, groups=1, chunk=64, width=4):
        super().__init__()
        self.heads, self.head_dim, self.state, self.groups, self.chunk = heads, head_dim, state, groups, chunk
        self.inner = heads * head_dim
        self.conv_dim = self.inner + 2 * groups * state
        self.in_proj = nn.Linear(hidden, self.inner + self.conv_dim + heads, bias=False)
        self.conv = nn.Conv1d(self.conv_dim, self.conv_dim, width, groups=self.conv_dim, padding=width - 1)
        self.dt_bias = nn.Parameter(torch.rand(heads) - 4.0)
        self.A_log = nn.Parameter(torch.log(torch.arange(1, heads + 1).float()))
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = nn.Parameter(torch.ones(self.inner))
        self.out_proj = nn.Linear(self.inner, hidden, bias=False)

    def forward(self, u):
        b, t, _ = u.shape
        z, xBC, dt = self.in_proj(u).split([self.inner, self.conv_dim, self.heads], dim=-1)
        xBC = F.silu(self.conv(xBC.transpose(1, 2))[..., :t].transpose(1, 2))
        x, B, C = xBC.split([self.inner, self.groups * self.state, self.groups * self.state], dim=-1)
        dt = F.softplus(dt + self.dt_bias)
        x = x.reshape(b, t, self.heads, self.head_dim)
        # Every head gets its own copy of its group's B and C.
        B, C = (
            y.reshape(b, t, self.groups, self.state).repeat_interleave(self.heads // self.groups, dim=2) for y in (B, C)
        )
        y = self.scan(x, dt, -torch.exp(self.A_log), B, C) + self.D[:, None] * x
        y = y.reshape(b, t, self.inner) * F.silu(z)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5) * self.norm
        return self.out_proj(y)

    def scan(self, x, dt, A, B, C):
        """Chunked scan: inside each chunk an attention-like product, between chunks a small recurrence."""
        b, t, h, p = x.shape
        pad = -t % self.chunk
        x, dt, B, C = (F.pad(v, [0, 0] * (v.dim() - 2) + [0, pad]) for v in (x, dt, B, C))
        chunks = (t + pad) // self.chunk
        x = (x * dt[..., None]).reshape(b, chunks, self.chunk, h, p)
        B, C = (v.reshape(b, chunks, self.chunk, h, -1) for v in (B, C))
        a = (dt * A).reshape(b, chunks, self.chunk, h).permute(0, 3, 1, 2)  # (b, h, c, l)
        total = a.cumsum(-1)

        decay = torch.exp(segment_sum(a)).permute(0, 2, 3, 4, 1)  # (b, c, l, s, h)
        scores = (C[:, :, :, None] * B[:, :, None]).sum(-1) * decay  # (b, c, l, s, h)
        diagonal = (scores[..., None] * x[:, :, None]).sum(3)  # (b, c, l, h, p)

        to_end = torch.exp(total[..., -1:] - total).permute(0, 2, 3, 1)  # (b, c, l, h)
        states = ((B * to_end[..., None])[..., None, :] * x[..., None]).sum(2)  # (b, c, h, p, n)
        states = torch.cat([torch.zeros_like(states[:, :1]), states], dim=1)
        between = torch.exp(segment_sum(F.pad(total[..., -1], (1, 0)))).permute(0, 2, 3, 1)  # (b, z, c, h)
        states = (between[..., None, None] * states[:, None]).sum(2)[:, :-1]  # (b, c, h, p, n)

        from_start = torch.exp(total).permute(0, 2, 3, 1)  # (b, c, l, h)
        carried = (C[..., None, :] * states[:, :, None]).sum(-1) * from_start[..., None]
        return (diagonal + carried).reshape(b, t + pad, h, p)[:, :t]


def get_inputs():
    """One sequence of a length that is no multiple of the chunk."""
    return [torch.randn(1, 500, 768)]


def get_init_inputs():
    """All defaults: the sizes of a 130M-parameter model."""
    return []
