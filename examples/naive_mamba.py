"""A textbook Mamba-1 layer with its recurrence as a Python loop over time.

KernelBench convention: ``Model``, ``get_inputs()``, ``get_init_inputs()``. Nothing here knows of
refold. Try ``refold explain examples/naive_mamba.py`` and ``refold optimize examples/naive_mamba.py``.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """One Mamba-1 layer: projection, causal convolution, selective scan, gate, projection."""

    def __init__(self, hidden=256, state=16, width=4, expand=2):
        super().__init__()
        self.inner, self.state, self.rank, self.width = expand * hidden, state, hidden // 16, width
        self.in_proj = nn.Linear(hidden, 2 * self.inner, bias=False)
        self.conv = nn.Conv1d(self.inner, self.inner, width, groups=self.inner)
        self.x_proj = nn.Linear(self.inner, self.rank + 2 * state, bias=False)
        self.dt_proj = nn.Linear(self.rank, self.inner)
        self.A_log = nn.Parameter(torch.log(torch.arange(1, state + 1).float()).repeat(self.inner, 1))
        self.D = nn.Parameter(torch.ones(self.inner))
        self.out_proj = nn.Linear(self.inner, hidden, bias=False)
        nn.init.uniform_(self.dt_proj.bias, -6.0, -2.0)

    def forward(self, u):
        x, z = self.in_proj(u).chunk(2, dim=-1)
        x = F.silu(self.conv(F.pad(x.transpose(1, 2), (self.width - 1, 0))).transpose(1, 2))
        dt, B, C = self.x_proj(x).split([self.rank, self.state, self.state], dim=-1)
        dt = F.softplus(self.dt_proj(dt))
        A = -torch.exp(self.A_log)

        h = torch.zeros(u.shape[0], self.inner, self.state, device=u.device, dtype=u.dtype)
        ys = []
        for t in range(u.shape[1]):
            decay = torch.exp(dt[:, t, :, None] * A)
            h = decay * h + dt[:, t, :, None] * B[:, t, None, :] * x[:, t, :, None]
            ys.append((h * C[:, t, None, :]).sum(-1))
        y = torch.stack(ys, dim=1) + self.D * x
        return self.out_proj(y * F.silu(z))


def get_inputs():
    """One sequence, as long as patience with the loop allows."""
    return [torch.randn(1, 512, 256)]


def get_init_inputs():
    """Return the constructor's arguments: the defaults."""
    return []
