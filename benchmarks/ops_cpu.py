"""Time the operators on the CPU against what one would write without it, interleaved, errors checked first.

    OMP_NUM_THREADS=2 python benchmarks/ops_cpu.py [--rounds 15] [--transformers] [--out FILE.jsonl]

``selective_scan`` runs against a Python loop over time and a compiled associative scan, ``ssd`` against the einsum path
of transformers' Mamba-2 if asked to. Rounds are interleaved, so that load on the machine meets all of them alike.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import refold.ops as ops


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
    """Do the same with time behind the channels, as the reference code of the Mamba paper lays it out."""
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


def race(name: str, runners: dict[str, Callable[..., Any]], inputs: tuple[Any, ...], rounds: int) -> dict[str, Any]:
    """Check that all agree, then time them in turns; return a row."""
    truth = runners["refold"](*inputs)
    times: dict[str, list[float]] = {}
    for label, runner in runners.items():
        error = float((runner(*inputs) - truth).abs().max() / truth.abs().max())
        assert error < 1e-4, f"{label} differs by {error:.1e}"
    for _ in range(rounds):
        for label, runner in runners.items():
            start = time.perf_counter()
            runner(*inputs)
            times.setdefault(label, []).append((time.perf_counter() - start) * 1e3)
    medians = {label: sorted(t)[len(t) // 2] for label, t in times.items()}
    row = {"op": name, "threads": torch.get_num_threads(), "torch": torch.__version__, "rounds": rounds}
    row["median_ms"] = {label: round(m, 2) for label, m in medians.items()}
    row["fastest_ms"] = {label: round(min(t), 2) for label, t in times.items()}
    print(json.dumps(row))
    return row | {
        "command": " ".join(["python", *sys.argv]),
        "date": str(datetime.date.today()),
        "processor": processor(),
    }


def processor() -> str:
    """Return the name of the processor."""
    names = [line.partition(":")[2] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return f"{names[0].strip()}, {torch.backends.cpu.get_cpu_capability()}"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--transformers", action="store_true", help="time transformers' Mamba-2 too")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)

    x, dt, A = torch.randn(1, 2048, 1536), torch.rand(1, 2048, 1536) * 0.1, -torch.rand(1536, 16)
    B, C = torch.randn(1, 2048, 16), torch.randn(1, 2048, 16)
    runners: dict[str, Callable[..., Any]] = {
        "refold": lambda *inputs: ops.selective_scan(*inputs)[0],
        "loop over time": loop_over_time,
        "loop, channels first": channels_first_loop,
        "compiled associative scan": torch.compile(associative),
    }
    rows = [race("selective_scan 1 x 2048 x 1536 x 16", runners, (x, dt, A, B, C), args.rounds)]

    if args.transformers:
        from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

        x, dt, A = torch.randn(1, 2048, 24, 64), torch.rand(1, 2048, 24) * 0.1, -torch.rand(24)
        B, C = torch.randn(1, 2048, 1, 128), torch.randn(1, 2048, 1, 128)
        runners = {"refold": lambda *inputs: ops.ssd(*inputs)[0]}
        for size in (64, 128, 256):
            runners[f"transformers, chunks of {size}"] = lambda *inputs, size=size: mamba2_chunk_scan(*inputs, size)
        rows.append(race("ssd 1 x 2048 x 24 x 64, n=128", runners, (x, dt, A, B, C), args.rounds))
    if args.out:
        with args.out.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    with torch.no_grad():
        main()
