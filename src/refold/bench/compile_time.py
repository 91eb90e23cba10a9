"""How long the first call of a naive Mamba-1 loop takes: tracing, checks, timing and code, everything included.

Batch 1, 64 channels, state 16, float32, inference. On a new machine, run it once before: code that libraries compile
and keep is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

import refold

from .progress import wanted
from .rows import Row

CHANNELS, STATE = 64, 16


def layer(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor
) -> torch.Tensor:  # one step after another, as papers write it
    """Return a selective scan over (batch, time, channels)."""
    h, ys = torch.zeros(x.shape[0], x.shape[2], A.shape[1]), []
    for t in range(x.shape[1]):
        decay = torch.exp(dt[:, t, :, None] * A)
        h = decay * h + dt[:, t, :, None] * B[:, t, None, :] * x[:, t, :, None]
        ys.append((h * C[:, t, None, :]).sum(-1))
    return torch.stack(ys, dim=1) + x


def measure(steps: int, layers: int) -> Row:
    """Compile and run once; return one row."""

    def model(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        for _ in range(layers):
            x = torch.tanh(layer(x, *rest))
        return x

    torch.manual_seed(0)
    shape = (1, steps)
    inputs = [
        torch.randn(*shape, CHANNELS), torch.rand(*shape, CHANNELS), -torch.rand(CHANNELS, STATE),
        torch.randn(*shape, STATE), torch.randn(*shape, STATE),
    ]  # fmt: skip
    torch.compiler.reset()
    compiled = refold.compile(model, cache=False)
    start, work = time.perf_counter(), time.process_time()
    with torch.no_grad():
        compiled(*inputs)
    wall, work = time.perf_counter() - start, time.process_time() - work
    return {
        "case": f"{layers} x {steps}",
        "steps": steps,
        "layers": layers,
        "first_call_s": wall,
        "first_call_cpu_s": work,
        "report": compiled.report.to_dict(),
    }


def compile_time(*, steps: tuple[int, ...] = (512, 4096), layers: int = 1) -> Iterator[Row]:
    """Time the first call of a naive Mamba-1 loop, by the number of its steps."""
    for count in steps:
        if wanted(steps=count, layers=layers):
            yield measure(count, layers)
