"""How long the first call takes of a naive Mamba-1 loop: tracing, proof, races and code, everything included.

``python benchmarks/compile_time.py --steps 512 --layers 1 --out FILE.jsonl``

Batch 1, 64 channels, state 16, float32, inference. One row goes to ``--out``. Run it once before on a new machine:
what libraries compile for themselves and keep is not counted.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from pathlib import Path

import torch

import refold

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


def measure(steps: int, layers: int) -> dict[str, object]:
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
    compiled = refold.compile(model)
    start, work = time.perf_counter(), time.process_time()
    with torch.no_grad():
        compiled(*inputs)
    wall, work = time.perf_counter() - start, time.process_time() - work
    print(compiled.report, file=sys.stderr)
    return {
        "benchmark": "compile_time",
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "steps": steps,
        "layers": layers,
        "first_call_s": wall,
        "first_call_cpu_s": work,
        "report": compiled.report.to_dict(),
    }


def main() -> None:
    """Measure, print a line, append a row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    row = measure(arguments.steps, arguments.layers)
    print(f"{arguments.layers} x {arguments.steps} steps: first call {row['first_call_s']:.1f} s")
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        with arguments.out.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
