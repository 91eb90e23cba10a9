"""Draw the figures of the documents from stored results; ``--check`` fails if they are stale.

A figure carries the digest of the rows that it was drawn from, so that checking it needs no drawing. Drawing needs
matplotlib, which nothing else here does.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from render_tables import CPUS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FIGURES = ROOT / "docs" / "figures"
OURS, PEER, FLOOR = "#d1495b", "#8d99ae", "#2b2d42"

Rows = list[dict[str, Any]]


def newest(machine: str, name: str, *keys: str) -> Rows:
    """Return the rows of one result file, the newest of each kind."""
    rows: dict[Any, dict[str, Any]] = {}
    for line in (RESULTS / machine / f"{name}.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows[tuple(row[key] for key in keys)] = row
    return list(rows.values())


def operators() -> Rows:
    """Return the rows of the scans that ran beside the official kernels."""
    rows = [row for name in ("ssd", "selective_scan") for row in newest("nvidia-h200", name, "op", "case", "dtype")]
    return [row for row in rows if isinstance(row["mamba_ssm_ms"], float) and "all options" not in row["case"]]


def draw_operators(rows: Rows, path: Path) -> None:
    """Draw times of the scans on a GPU: ours, the official kernels', and what copying the same bytes takes."""
    import matplotlib.pyplot as plt

    groups: dict[str, Rows] = {}
    for row in rows:
        groups.setdefault(f"{row['op']}, {row['dtype']}", []).append(row)
    widths = [len(group) for group in groups.values()]
    figure, panels = plt.subplots(
        1, len(groups), figsize=(2 + 0.55 * sum(widths), 3.6), sharey=True, squeeze=False, width_ratios=widths
    )
    for panel, (title, group) in zip(panels[0], groups.items(), strict=True):
        at = range(len(group))
        panel.bar([i - 0.2 for i in at], [row["mamba_ssm_ms"] for row in group], 0.4, color=PEER, label="mamba-ssm")
        panel.bar([i + 0.2 for i in at], [row["median_ms"] for row in group], 0.4, color=OURS, label="refold")
        floor = [row["share_of_copy"] * row["median_ms"] for row in group]
        panel.hlines(floor, [i - 0.45 for i in at], [i + 0.45 for i in at], color=FLOOR, label="copy of its bytes")
        panel.set_yscale("log")
        panel.set_title(title, fontsize=10)
        panel.set_xticks(list(at), [row["case"] for row in group], rotation=60, ha="right", fontsize=7)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel(f"ms, {rows[0]['env']['gpu']}")
    panels[0][0].legend(frameon=False, fontsize=8)
    save(figure, path)


def hybrid_layer() -> Rows:
    """Return the rows of the Granite hybrid layer."""
    files = sorted(RESULTS.glob("*/hybrid_layer.jsonl"))
    return [
        {**row, "machine": CPUS.get(file.parent.name, row["report"]["environment"]["device"])}
        for file in files
        for row in newest(file.parent.name, file.stem, "transformers", "dtype", "batch")
    ]


def draw_hybrid_layer(rows: Rows, path: Path) -> None:
    """Draw the time and the peak memory of the layer for each way of running it."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 0.5 + 0.75 * len(rows)), sharey=True)
    styles = {"eager": (FLOOR, -0.27), "torch.compile": (PEER, 0.0), "refold": (OURS, 0.27)}
    for panel, field, unit, scale in ((panels[0], "times_ms", "ms", 1), (panels[1], "peak_bytes", "MiB", 2**20)):
        for name, (color, shift) in styles.items():
            values = [row["report"]["graphs"][0][field].get(name, 0) / scale for row in rows]
            bars = panel.barh([i + shift for i in range(len(rows))], values, 0.25, color=color, label=name)
            panel.bar_label(bars, [_short(value) if value else "" for value in values], fontsize=7, padding=2)
        panel.set_xscale("log")
        for i, row in enumerate(rows):
            for name in styles.keys() - row["report"]["graphs"][0][field].keys():
                left = panel.get_xlim()[0]
                panel.text(left, i + styles[name][1], f" {name} fails", fontsize=7, va="center", color=styles[name][0])
        panel.set_xlabel(unit)
        panel.spines[["top", "right"]].set_visible(False)
    names = [f"{row['machine']}\n{row['dtype']}, transformers {row['transformers']}" for row in rows]
    panels[0].set_yticks(range(len(rows)), names, fontsize=8)
    panels[0].invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), frameon=False, fontsize=8, loc="upper center", ncols=3)
    save(figure, path)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def save(figure: Any, path: Path) -> None:
    """Write an SVG whose bytes depend on nothing but what was drawn."""
    import matplotlib

    matplotlib.rcParams.update({"svg.hashsalt": path.stem, "svg.fonttype": "none"})
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None, "Creator": None})


DRAWN: dict[str, tuple[Callable[[], Rows], Callable[[Rows, Path], None]]] = {
    "operators": (operators, draw_operators),
    "hybrid_layer": (hybrid_layer, draw_hybrid_layer),
}


def stamp(rows: Rows) -> str:
    """Return the line that tells which rows a figure shows."""
    digest = hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()
    return f"<!-- drawn from rows {digest} -->\n"


def main() -> None:
    """Draw, or check."""
    stale = []
    for name, (rows, draw) in DRAWN.items():
        path, mark = FIGURES / f"{name}.svg", stamp(rows())
        if path.exists() and path.read_text().endswith(mark):
            continue
        stale.append(path.name)
        if "--check" not in sys.argv:
            FIGURES.mkdir(exist_ok=True)
            draw(rows(), path)
            path.write_text(path.read_text() + mark)
    if stale and "--check" in sys.argv:
        sys.exit(f"stale figures {', '.join(stale)}: run python tools/render_figures.py (needs matplotlib)")


if __name__ == "__main__":
    main()
