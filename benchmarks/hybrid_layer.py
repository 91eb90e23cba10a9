"""transformers' own GraniteMoeHybridMambaLayer, unmodified: eager, torch.compile and refold in one run.

``python benchmarks/hybrid_layer.py --device cuda --batch 32 --out FILE.jsonl``

Sizes are those of granite-4.0-h-tiny. One row a dtype goes to ``--out``: the full report, with
interleaved times, peak memory, and the evidence for every rewrite. float32 runs without TF32.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers
from transformers import GraniteMoeHybridConfig
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer

import refold


def layer(device: str, dtype: torch.dtype) -> torch.nn.Module:
    """Return the layer at granite-4.0-h-tiny's sizes, random weights."""
    config = GraniteMoeHybridConfig(
        hidden_size=1536,
        mamba_n_heads=48,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_n_groups=1,
        mamba_chunk_size=256,
        mamba_expand=2,
    )
    torch.manual_seed(0)
    return GraniteMoeHybridMambaLayer(config, 0).to(device, dtype).eval()


def revision() -> str:
    """Return the git hash, from git or from the environment of an exported tree."""
    if given := os.environ.get("REFOLD_REVISION"):
        return given
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def measure(device: str, dtype: torch.dtype, batch: int, tokens: int) -> dict[str, object]:
    """Compile the layer and return its report as one row."""
    module = layer(device, dtype)
    x = torch.randn(batch, tokens, 1536, device=device, dtype=dtype)
    compiled = refold.compile(module)
    start = time.perf_counter()
    with torch.no_grad():
        compiled(x)
    first_call_s = time.perf_counter() - start
    print(compiled.report, file=sys.stderr)
    return {
        "benchmark": "hybrid_layer",
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "revision": revision(),
        "transformers": transformers.__version__,
        "dtype": str(dtype).removeprefix("torch."),
        "batch": batch,
        "tokens": tokens,
        "first_call_s": first_call_s,
        "report": compiled.report.to_dict(),
    }


def main() -> None:
    """Measure each dtype; print a table, append rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", nargs="+", default=["float32"])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    for name in arguments.dtype:
        row = measure(arguments.device, getattr(torch, name), arguments.batch, arguments.tokens)
        (graph,) = row["report"]["graphs"]
        times = ", ".join(f"{key} {ms:.3f} ms" for key, ms in graph["times_ms"].items())
        peaks = ", ".join(f"{key} {size / 2**30:.2f} GiB" for key, size in graph["peak_bytes"].items())
        print(f"{name} {arguments.batch} x {arguments.tokens}: {times}; peak {peaks}; {graph['chosen']} runs")
        if arguments.out:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            with arguments.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
