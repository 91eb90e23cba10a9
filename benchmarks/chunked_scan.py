"""A naive chunked Mamba-2 scan, outputs or last state: eager, torch.compile and refold in one run.

``python benchmarks/chunked_scan.py --device cuda --out FILE.jsonl``

The sizes are those of problems 48 and 49 of level 3 of KernelBench; log decays, B and C are parameters.
One row a problem goes to ``--out``: times of interleaved pairs, and the full report. float32 runs
without TF32.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from hybrid_layer import revision

import refold
from refold.verify import median_ms, race


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


def measure(device: str, returns: str, sizes: dict[str, int], channels: int) -> dict[str, object]:
    """Compile the module and return its times and its report as one row."""
    torch.manual_seed(0)
    module = ChunkedScan(returns, **sizes).to(device)
    x = torch.rand(sizes["batch"], sizes["tokens"], sizes["heads"], channels, device=device)
    compiled = refold.compile(module)
    with torch.no_grad():
        compiled(x)
        plain = torch.compile(module)
        plain(x)
        at = torch.device(device)
        result = race(lambda: module(x), lambda: compiled(x), at, budget_s=10.0)
        plain_ms = median_ms(lambda: plain(x), at)
    print(compiled.report, file=sys.stderr)
    return {
        "benchmark": "chunked_scan",
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "revision": revision(),
        "returns": returns,
        **sizes,
        "channels": channels,
        "eager_ms": result.base_ms,
        "refold_ms": result.candidate_ms,
        "torch_compile_ms": plain_ms,
        "speedup": result.speedup,
        "speedup_at_least": result.at_least,
        "report": compiled.report.to_dict(),
    }


def main() -> None:
    """Measure both problems; print a line each, append rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--returns", nargs="+", default=["outputs", "state"])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    sizes = {"batch": arguments.batch, "tokens": 128, "heads": 8, "states": 16, "chunk": 64}
    for returns in arguments.returns:
        row = measure(arguments.device, returns, sizes, channels=64)
        print(
            f"{returns}: eager {row['eager_ms']:.3f} ms, torch.compile {row['torch_compile_ms']:.3f} ms, "
            f"refold {row['refold_ms']:.3f} ms ({row['speedup']:.2f}x, at least {row['speedup_at_least']:.2f}x)"
        )
        if arguments.out:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            with arguments.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
