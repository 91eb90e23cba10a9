"""Linear attention with several kinds of decay: a state of keys times values, one token at a time.

All programs of a case get the same inputs. They are compared with the loop in float64, over the first tokens of the
first row, and timed in turns, each after the L2 cache was overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import refold

from ..verify import Function
from .contest import BOUND, contest
from .options import VERIFY, check_names
from .progress import wanted
from .rows import Row

HEAD = 256
"""Tokens of the first row that are compared with float64."""


def loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Compute ``S[t] = exp(g[t]) S[t-1] + k[t] v[t]ᵀ`` and return ``S[t]ᵀ q[t]``.

    Args:
        q: Queries, ``(b, t, h, n)``.
        k: Keys, like q.
        v: Values, ``(b, t, h, p)``.
        g: Log decays, ``(b, t, h, 1)`` of heads or ``(b, t, h, n)`` of their keys.
    """
    dtype = v.dtype
    q, k, v, g = (a.float() if a.dtype != torch.float64 else a for a in (q, k, v, g))
    state, out = torch.zeros(*k[:, 0].shape, v.shape[-1], dtype=v.dtype, device=v.device), []
    for t in range(q.shape[1]):
        state = g[:, t].exp().unsqueeze(-1) * state + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        out.append(torch.einsum("bhn,bhnp->bhp", q[:, t], state))
    return torch.stack(out, 1).to(dtype)


def loop_without_decay(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Do the same without a decay."""
    dtype = v.dtype
    q, k, v = (a.float() if a.dtype != torch.float64 else a for a in (q, k, v))
    state, out = torch.zeros(*k[:, 0].shape, v.shape[-1], dtype=v.dtype, device=v.device), []
    for t in range(q.shape[1]):
        state = state + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        out.append(torch.einsum("bhn,bhnp->bhp", q[:, t], state))
    return torch.stack(out, 1).to(dtype)


def by_fla(name: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Call fla's chunked kernel of a case."""
    import fla.ops as fla

    match name:
        case "linear-attention":
            return fla.linear_attn.chunk_linear_attn(q, k, v, scale=1.0, normalize=False)[0]
        case "retnet":
            return fla.retention.chunk_retention(q, k, v, scale=1.0)[0]
        case "simple-gla":
            return fla.simple_gla.chunk_simple_gla(q, k, v, g[..., 0], scale=1.0)[0]
    return fla.gla.chunk_gla(q, k, v, g, scale=1.0)[0]


def by_ssd(decays: bool, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Call refold's scan: a step of one, with rates of zero, or a decay of the head's own, with a rate of one."""
    one = torch.ones_like(g[..., 0])
    if not decays:
        return refold.ops.ssd(v, one, g.new_zeros(g.shape[2]).float(), k, q)[0]
    return refold.ops.ssd(v, one, g[0, 0, :, 0].float(), k, q)[0]


@dataclass(frozen=True)
class Attention:
    """A kind of linear attention.

    Attributes:
        source: The paper.
        loop: The naive program.
        decay: Returns log decays of given shape (b, t, h, n).
        operator: The same by an operator of refold, if there is one.
    """

    source: str
    loop: Function
    decay: Callable[..., Tensor]
    operator: Function | None = None


def _constant(b: int, t: int, h: int, n: int) -> Tensor:
    """Return RetNet's decays: 1 - 2**(-5 - i) of head i."""
    return torch.log1p(-(2.0 ** (-5 - torch.arange(h)))).view(h, 1).expand(b, t, h, 1)


def _drawn(b: int, t: int, h: int, n: int) -> Tensor:
    return torch.nn.functional.logsigmoid(torch.randn(b, t, h, n) + 3)


KINDS = {
    "linear-attention": Attention(
        "Katharopoulos et al. 2020, arXiv:2006.16236",
        loop_without_decay,
        lambda b, t, h, n: torch.zeros(b, t, h, 1),
        partial(by_ssd, False),
    ),
    "retnet": Attention("Sun et al. 2023, arXiv:2307.08621", loop, _constant, partial(by_ssd, True)),
    "simple-gla": Attention("Dao & Gu 2024, arXiv:2405.21060", loop, lambda b, t, h, n: _drawn(b, t, h, 1)),
    "gla": Attention("Yang et al. 2023, arXiv:2312.06635", loop, _drawn),
}


def linear_attention(
    *, device: str = "cuda", case: tuple[str, ...] = tuple(KINDS), tokens: tuple[int, ...] = (2048, 8192),
    batch: int = 4, heads: int = 16, channels: int = 64, dtype: str = "bfloat16", grad: bool = False, rounds: int = 10,
    eager: bool = True, inductor: bool = False, verify: str = "quick",
) -> Iterator[Row]:  # fmt: skip
    """Time linear attention without and with decays: naive loops, refold, fla, and with inductor=true torch.compile."""
    check_names("linear-attention: case", case, KINDS)
    check_names("linear-attention: dtype", [dtype], BOUND)
    check_names("linear-attention: verify", [verify], VERIFY)
    for name in case:
        for length in tokens:
            what: Row = {"case": name, "tokens": length, "batch": batch, "dtype": dtype}
            what["pass"] = "forward and backward" if grad else "forward"
            if wanted(**what):
                torch.manual_seed(0)
                torch.compiler.reset()
                kind, shape = KINDS[name], (batch, length, heads, channels)
                drawn = [torch.randn(shape), torch.randn(shape) / channels**0.5, torch.randn(shape), kind.decay(*shape)]
                inputs = [a.to(device, getattr(torch, dtype)).requires_grad_(grad) for a in drawn]
                compiled = refold.compile(kind.loop, verify=verify, accept="always" if verify == "off" else "faster")
                programs: dict[str, Function] = {"refold": compiled, "fla": partial(by_fla, name)}
                programs |= {"refold.ops": kind.operator} if kind.operator else {}
                programs |= {"eager": kind.loop} if eager else {}
                programs |= {"torch.compile": torch.compile(kind.loop)} if inductor else {}
                row = what | {"heads": heads, "channels": channels, "source": kind.source}
                row |= measure(kind.loop, programs, inputs, BOUND[dtype], rounds)
                yield row | {"found": [one.detail for graph in compiled.report.graphs for one in graph.applied]}


def measure(reference: Function, programs: dict[str, Function], inputs: list[Tensor], bound: float, rounds: int) -> Row:
    """Check programs against the loop in float64, and time those that are right."""
    short: Any = [a.detach()[:1, :HEAD].double() for a in inputs]
    grad, dy = inputs[0].requires_grad, torch.randn_like(inputs[2])

    def run(program: Function) -> Tensor:
        with torch.set_grad_enabled(grad):
            y = program(*inputs)
        if grad:
            torch.autograd.grad(y, inputs, dy, allow_unused=True)
        return y.detach()

    calling = {name: partial(run, program) for name, program in programs.items()}
    row, _ = contest(
        calling, lambda: reference(*short), bound, rounds, inputs[0].device, medians="median_ms",
        compared=lambda y: y[:1, :HEAD],
    )  # fmt: skip
    return row
