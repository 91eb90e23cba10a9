"""A naive chunked Mamba-2 scan, outputs or last state: eager, torch.compile and refold in one run.

The sizes are those of problems 48 and 49 of level 3 of KernelBench; log decays, B and C are parameters. float32 runs
without TF32.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

import refold

from .contest import BOUND, contest
from .options import check_names
from .progress import wanted
from .rows import Row


def between(a: torch.Tensor) -> torch.Tensor:
    """Return the decay from each position to each later one, ``exp(a[j+1] + ... + a[i])``; a has time last."""
    total = a.cumsum(-1)
    later = torch.ones(a.shape[-1], a.shape[-1], dtype=torch.bool, device=a.device).tril()
    return (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~later, -torch.inf).exp()


class ChunkedScan(torch.nn.Module):
    """State space duality as its paper lists it; returns the outputs or only the last state."""

    def __init__(self, returns: str, batch: int, tokens: int, heads: int, states: int, chunk: int) -> None:
        super().__init__()
        self.returns, self.chunk = returns, chunk
        self.log_decay = torch.nn.Parameter(torch.randn(batch, tokens, heads))
        self.B = torch.nn.Parameter(torch.randn(batch, tokens, heads, states))
        self.C = torch.nn.Parameter(torch.randn(batch, tokens, heads, states))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, tokens, heads, channels) to the same, or to (batch, heads, channels, states)."""
        X, a, B, C = (v.unflatten(1, (-1, self.chunk)) for v in (x, self.log_decay, self.B, self.C))
        a = a.permute(0, 3, 1, 2)
        since = a.cumsum(-1)
        y = torch.einsum("bcihn,bcjhn,bhcij,bcjhp->bcihp", C, B, between(a), X)
        written = torch.einsum("bcjhn,bhcj,bcjhp->bchpn", B, (since[..., -1:] - since).exp(), X)
        written = torch.cat([torch.zeros_like(written[:, :1]), written], dim=1)
        carried = torch.einsum("bhzc,bchpn->bzhpn", between(F.pad(since[..., -1], (1, 0))), written)
        if self.returns == "state":
            return carried[:, -1]
        y = y + torch.einsum("bcihn,bchpn,bhci->bcihp", C, carried[:, :-1], since.exp())
        return y.flatten(1, 2)


@torch.no_grad()
def chunked_scan(
    *, device: str = "cuda", batch: int = 2048, returns: tuple[str, ...] = ("outputs", "state"), rounds: int = 15
) -> Iterator[Row]:
    """Time KernelBench's chunked Mamba-2 (level 3, problems 48 and 49): eager, torch.compile and refold."""
    sizes = {"batch": batch, "tokens": 128, "heads": 8, "states": 16, "chunk": 64}
    check_names("chunked-scan: returns", returns, ("outputs", "state"))
    at = torch.device(device)
    for what in returns:
        if not wanted(case=what, batch=batch):
            continue
        torch.manual_seed(0)
        module = ChunkedScan(what, **sizes).to(at)
        x = torch.rand(sizes["batch"], sizes["tokens"], sizes["heads"], 64, device=at)
        compiled = refold.compile(module)
        programs = {"eager": module, "torch.compile": torch.compile(module), "refold": compiled}
        calling = {name: partial(program, x) for name, program in programs.items()}
        exact = lambda: copy.deepcopy(module).double()(x.double())  # noqa: B023, E731
        row, _ = contest(calling, exact, BOUND["float32"], rounds, at)
        yield {"case": what, **sizes, "channels": 64, **row, "report": compiled.report.to_dict()}
