"""The language model of the published kernel-fusion example: eager, torch.compile and refold in one run.

``python benchmarks/fusion_example.py --device cuda --batch 1 4 16 --dtype float32 bfloat16 --out FILE.jsonl``

Sizes are the published ones unless given: 8 layers, width 1024, 32 states, 512 tokens, a vocabulary of 16384. One row a
dtype and batch goes to ``--out``: interleaved times, peak memory beyond the weights, and the difference of the logits.
float32 runs without TF32. Plain torch.compile takes minutes for the unrolled loops and is asked for with
``--inductor``.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from hybrid_layer import revision

import refold
from refold.verify import race
from refold.verify.memory import peak_bytes
from refold.verify.timing import median_ms

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))


def first_call(run: Callable[[], object]) -> float:
    """Return the seconds that a call takes which compiles."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(arguments: argparse.Namespace, dtype: str, batch: int) -> dict[str, object]:
    """Run one size and return its row."""
    source = importlib.import_module(arguments.example)
    device = torch.device(arguments.device)
    sizes = {"layers": arguments.layers, "width": arguments.width, "state": arguments.state, "vocabulary": 16384}
    torch.manual_seed(0)
    model = source.Model(**sizes).to(device, getattr(torch, dtype)).eval()
    (tokens,) = (x.to(device) for x in source.get_inputs(batch, arguments.tokens, 16384))
    torch._dynamo.reset()
    options = {"strict": True, **({} if arguments.prove else {"verify": "off", "accept": "always"})}
    programs: dict[str, Callable[..., object]] = {
        "eager": model,
        "refold": refold.compile(model, **options),
        **({"torch.compile": torch.compile(model)} if arguments.inductor else {}),
    }
    runs = {name: partial(program, tokens) for name, program in programs.items()}
    with torch.no_grad():
        first_call_s = {name: first_call(run) for name, run in runs.items()}
        times_ms = {name: median_ms(run, device, budget_s=2.0) for name, run in runs.items()}
        result = race(runs["eager"], runs["refold"], device, budget_s=arguments.budget)
        expected, found = runs["eager"]().double(), runs["refold"]().double()
        row = {
            "benchmark": "fusion_example",
            "command": " ".join(["python", *sys.argv]),
            "date": datetime.date.today().isoformat(),
            "revision": revision(),
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
            "example": arguments.example,
            **sizes,
            "tokens": arguments.tokens,
            "dtype": dtype,
            "batch": batch,
            "first_call_s": first_call_s,
            "times_ms": {**times_ms, "eager": result.base_ms, "refold": result.candidate_ms},
            "speedup_over_eager": result.speedup,
            "speedup_at_least": result.at_least,
            "peak_bytes": {name: peak_bytes(run, device) for name, run in runs.items()},
            "difference": float((found - expected).norm() / expected.norm()),
        }
    return row


def main() -> None:
    """Measure each dtype and batch; print a line, append a row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--example", default="fused_mamba", choices=["fused_mamba", "fused_mamba1"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", nargs="+", default=["float32"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--state", type=int, default=32)
    parser.add_argument("--budget", type=float, default=10.0, help="seconds a race may take")
    parser.add_argument("--inductor", action="store_true", help="compile with plain torch.compile, too")
    parser.add_argument("--prove", action="store_true", help="prove and race every rewrite while compiling")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    for dtype in arguments.dtype:
        for batch in arguments.batch:
            row = measure(arguments, dtype, batch)
            times = ", ".join(f"{name} {ms:.3f} ms" for name, ms in row["times_ms"].items())
            peaks = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in row["peak_bytes"].items())
            print(f"{dtype} batch {batch}: {times}; peak {peaks}; difference {row['difference']:.1e}", flush=True)
            if arguments.out:
                arguments.out.parent.mkdir(parents=True, exist_ok=True)
                with arguments.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
