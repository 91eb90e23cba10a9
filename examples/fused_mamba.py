"""A small Mamba language model whose recurrence walks over time in a comprehension.

The layer of the published kernel-fusion example: every state decays by exp(-A) * delta, with delta *outside* of the
exponential, so that a decay may exceed one. KernelBench convention: ``Model``, ``get_inputs()``,
``get_init_inputs()``. Nothing here knows of refold. Try ``refold explain examples/fused_mamba.py`` and
``refold optimize examples/fused_mamba.py``.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class RMSNorm(nn.Module):
    """Scale each token to a root mean square of one."""

    def __init__(self, width):
        super().__init__()
        self.scale = width**0.5
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * self.weight * self.scale / (x.norm(dim=-1, keepdim=True) + 1e-5)


class Block(nn.Module):
    """Projection, causal convolution, recurrence, gate, projection."""

    def __init__(self, width, state, kernel):
        super().__init__()
        self.in_proj = nn.Linear(width, 2 * width, bias=False)
        self.conv = nn.Conv1d(width, width, kernel, padding=kernel - 1, groups=width)
        self.to_B = nn.Linear(width, state, bias=False)
        self.to_C = nn.Linear(width, state, bias=False)
        self.to_delta = nn.Sequential(
            nn.Linear(width, width // 16, bias=False), nn.Linear(width // 16, width, bias=False)
        )
        self.A = nn.Parameter(torch.arange(1.0, state + 1).repeat(width, 1))
        self.D = nn.Parameter(torch.ones(width))
        self.out_proj = nn.Linear(width, width, bias=False)

    def forward(self, x):
        a, gate = self.in_proj(x).chunk(2, dim=-1)
        a = F.silu(self.conv(a.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        return self.out_proj(self.mix(a) * F.silu(gate))

    def mix(self, a):
        """Mix over time: h[t] = decay[t] h[t-1] + input[t], y[t] = h[t] · C[t] + D a[t]."""
        delta = F.softplus(self.D + self.to_delta(a))
        decay = torch.einsum("dn,btd->btdn", torch.exp(-self.A), delta)
        inputs = torch.einsum("btn,btd->btdn", self.to_B(a), delta) * a.unsqueeze(-1)
        h = torch.zeros_like(inputs[:, 0])
        states = torch.stack([h := d * h + x for d, x in zip(decay.unbind(1), inputs.unbind(1))], dim=1)  # noqa: B905
        return torch.einsum("btdn,btn->btd", states, self.to_C(a)) + self.D * a


class Model(nn.Module):
    """Embedding, blocks with residual connections, logits."""

    def __init__(self, layers=1, width=256, state=16, kernel=4, vocabulary=512):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.norms = nn.ModuleList(RMSNorm(width) for _ in range(layers))
        self.blocks = nn.ModuleList(Block(width, state, kernel) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for norm, block in zip(self.norms, self.blocks):  # noqa: B905
            x = block(norm(x)) + x
        return self.head(x)


def get_inputs(batch=1, tokens=256, vocabulary=512):
    """One sequence of tokens."""
    return [torch.randint(vocabulary, (batch, tokens))]


def get_init_inputs():
    """Small enough for a demonstration; the published sizes are 8 layers of width 1024 with 32 states."""
    return []
