"""The language model of fused_mamba.py with Mamba-1's own discretisation: decays are exp(-delta * exp(A_log)).

KernelBench convention: ``Model``, ``get_inputs()``, ``get_init_inputs()``. Nothing here knows of refold. Try
``refold explain examples/fused_mamba1.py`` and ``refold optimize examples/fused_mamba1.py``.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def normalised(x, eps=1e-5):
    """Scale each token to a root mean square of one."""
    return x / torch.sqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps)


class Block(nn.Module):
    """Projection, causal convolution, selective scan, gate, projection."""

    def __init__(self, width, state, kernel):
        super().__init__()
        self.sizes = [math.ceil(width / 16), state, state]
        self.in_proj = nn.Linear(width, 2 * width, bias=False)
        self.conv = nn.Conv1d(width, width, kernel, padding=kernel - 1, groups=width)
        self.x_proj = nn.Linear(width, sum(self.sizes), bias=False)
        self.dt_proj = nn.Linear(self.sizes[0], width)
        self.A_log = nn.Parameter(torch.log(torch.arange(1.0, state + 1).repeat(width, 1)))
        self.D = nn.Parameter(torch.ones(width))
        self.out_proj = nn.Linear(width, width, bias=False)

    def forward(self, x):
        x, z = self.in_proj(x).chunk(2, dim=-1)
        x = F.silu(self.conv(x.transpose(1, 2))[:, :, : x.size(1)].transpose(1, 2))
        dt, B, C = self.x_proj(x).split(self.sizes, dim=-1)
        y = self.scan(x, F.softplus(self.dt_proj(dt)), -torch.exp(self.A_log), B, C)
        return self.out_proj((y + self.D * x) * F.silu(z))

    def scan(self, x, delta, A, B, C):
        """Walk over time; x and delta are (batch, time, width), B and C (batch, time, state)."""
        decay = torch.exp(delta[..., None] * A)
        inputs = delta[..., None] * B[:, :, None] * x[..., None]
        h, states = torch.zeros_like(inputs[:, 0]), []
        for t in range(x.size(1)):
            h = decay[:, t] * h + inputs[:, t]
            states.append(h)
        return (torch.stack(states, dim=1) * C[:, :, None]).sum(dim=-1)


class Model(nn.Module):
    """Embedding, blocks with residual connections, logits."""

    def __init__(self, layers=1, width=256, state=16, kernel=4, vocabulary=512):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, state, kernel) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(normalised(x))
        return self.head(x)


def get_inputs(batch=1, tokens=256, vocabulary=512):
    """One sequence of tokens."""
    return [torch.randint(vocabulary, (batch, tokens))]


def get_init_inputs():
    """Small enough for a demonstration; the published sizes are 8 layers of width 1024 with 32 states."""
    return []
