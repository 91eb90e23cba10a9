"""Render the tables of README.md from stored results; ``--check`` fails if they are stale.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``. Results are JSON lines in
``benchmarks/results/MACHINE/``, newest row last; the tables quote nothing else.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from refold.bench.plots import CPUS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ["README.md"]


def hybrid_layer() -> str:
    """Return the table of the Granite hybrid layer: one row a machine, release, dtype and size."""
    newest = {}
    for path in sorted(RESULTS.glob("*/hybrid_layer.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            newest[path.parent.name, row["transformers"], row["dtype"], row["batch"]] = row
    lines = [
        "| machine | transformers | dtype | batch x tokens | eager | torch.compile | refold | peak, eager -> refold |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (folder, release, dtype, batch), row in newest.items():
        (graph,) = row["report"]["graphs"]
        times, peaks = graph["times_ms"], graph["peak_bytes"]
        device = CPUS.get(folder, row["report"]["environment"]["device"])
        compiled = f"{times['torch.compile']:.1f} ms" if "torch.compile" in times else "fails (torch 2.11)"
        lines.append(
            f"| {device} | {release} | {dtype} | {batch} x {row['tokens']} | {times['eager']:.1f} ms | {compiled} "
            f"| **{times['refold']:.2f} ms** | {_size(peaks['eager'])} -> {_size(peaks['refold'])} |"
        )
    return "\n".join(lines)


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


TABLES = {"hybrid_layer": hybrid_layer}


def render(text: str) -> str:
    """Return a page with its tables filled in."""

    def fill(match: re.Match[str]) -> str:
        return f"<!-- table: {match[1]} -->\n{TABLES[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", fill, text, flags=re.DOTALL)


def main() -> None:
    """Render, or check."""
    stale = []
    for name in PAGES:
        path = ROOT / name
        text = path.read_text()
        if (fresh := render(text)) != text:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(fresh)
    if stale and "--check" in sys.argv:
        sys.exit(f"stale tables in {', '.join(stale)}: run python tools/render_tables.py")


if __name__ == "__main__":
    main()
