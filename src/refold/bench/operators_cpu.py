"""The operators on the CPU, against code without them.

``selective_scan`` runs against a Python loop over time and a compiled associative scan, ``ssd`` against the einsum path
of transformers' Mamba-2. Results are compared first. Programs take turns, so load on the machine affects all of them
alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import ops
from .compile_time import compile_time
from .contest import BOUND, contest
from .progress import wanted
from .recurrences import recurrences
from .rows import Row


def loop_over_time(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """Form all decays and inputs, then one token after the other: the spelling of most model files."""
    decays = torch.exp(dt[..., None] * A)
    inputs = (dt * x)[..., None] * B[:, :, None]
    state, ys = torch.zeros(x.shape[0], *A.shape), []
    for t in range(x.shape[1]):
        state = decays[:, t] * state + inputs[:, t]
        ys.append((state @ C[:, t, :, None])[..., 0])
    return torch.stack(ys, 1)


def channels_first_loop(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """Do the same with time after the channels, as the reference code of the Mamba paper lays it out."""
    u, steps, Bt, Ct = (a.mT.contiguous() for a in (x, dt, B, C))
    decays = torch.exp(torch.einsum("bdl,dn->bdln", steps, A))
    inputs = torch.einsum("bdl,bnl,bdl->bdln", steps, Bt, u)
    state, ys = torch.zeros(x.shape[0], *A.shape), []
    for t in range(x.shape[1]):
        state = decays[:, :, t] * state + inputs[:, :, t]
        ys.append(torch.einsum("bdn,bn->bd", state, Ct[:, :, t]))
    return torch.stack(ys, 2).mT


def associative(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """Scan pairs of decay and input in parallel."""
    from torch._higher_order_ops.associative_scan import associative_scan

    def combine(one: tuple[Tensor, Tensor], two: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return one[0] * two[0], two[0] * one[1] + two[1]

    pairs = torch.exp(dt[..., None] * A), (dt * x)[..., None] * B[:, :, None]
    states = associative_scan(combine, pairs, dim=1, combine_mode="generic")[1]
    return torch.einsum("btdn,btn->btd", states, C)


def compared(case: str, programs: dict[str, Callable[..., Any]], inputs: tuple[Tensor, ...], rounds: int) -> Row:
    """Time programs of the same inputs in turns; the operator of ours, in float64, is what all are compared with."""
    exact = partial(programs["refold"], *(a.double() for a in inputs))
    calling = {name: partial(program, *inputs) for name, program in programs.items()}
    row, _ = contest(calling, exact, BOUND["float32"], rounds, inputs[0].device)
    return {"case": case, "rounds": rounds, **row}


def cpu(*, tokens: int = 1024, rounds: int = 5, steps: int = 256, transformers: bool = True) -> Iterator[Row]:
    """Measure what makes sense without a GPU, in under 5 minutes: operators, loops found, decoding of 130M."""
    with torch.no_grad():
        yield from operators(tokens=tokens, rounds=rounds, transformers=transformers)
    yield from compile_time(steps=(steps,))
    yield from recurrences(steps=(steps,), case=("min-gru", "linear-attention", "selective"))
    if transformers:
        from .generation_torch import generation_torch_cpu

        yield from generation_torch_cpu(tokens=8, seqlen=64, repeats=3)


def operators(*, tokens: int, rounds: int, transformers: bool) -> Iterator[Row]:
    """Time selective_scan and ssd on the CPU, next to loops over time, an associative scan, and transformers."""
    if wanted(case=(case := f"selective_scan 1 x {tokens} x 1536 x 16")):
        torch.manual_seed(0)
        x, dt, A = torch.randn(1, tokens, 1536), torch.rand(1, tokens, 1536) * 0.1, -torch.rand(1536, 16)
        B, C = torch.randn(1, tokens, 16), torch.randn(1, tokens, 16)
        runners: dict[str, Callable[..., Any]] = {
            "refold": lambda *inputs: ops.selective_scan(*inputs)[0],
            "loop over time": loop_over_time,
            "loop, channels first": channels_first_loop,
            "compiled associative scan": torch.compile(associative),
        }
        yield compared(case, runners, (x, dt, A, B, C), rounds)
    if wanted(case=(case := f"ssd 1 x {tokens} x 24 x 64, n=128")):
        torch.manual_seed(0)
        x, dt, A = torch.randn(1, tokens, 24, 64), torch.rand(1, tokens, 24) * 0.1, -torch.rand(24)
        B, C = torch.randn(1, tokens, 1, 128), torch.randn(1, tokens, 1, 128)
        runners = {"refold": lambda *inputs: ops.ssd(*inputs)[0]}
        if transformers:
            from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

            for size in (64, 128, 256):
                runners[f"transformers, chunks of {size}"] = lambda *inputs, size=size: mamba2_chunk_scan(*inputs, size)
        yield compared(case, runners, (x, dt, A, B, C), rounds)
