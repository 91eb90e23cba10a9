"""Figures of stored results, all with one look.

A figure contains the digest of the rows that it was drawn from, so checking it needs no drawing. Only drawing needs
matplotlib.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, MissingDependency
from ..ops.spec import load
from . import scale_model
from .published import RESULTS
from .rows import Row, everywhere, machines, measured, rounded, stored

OURS, PEER, EAGER, INK, SOFT = "#b8324a", "#6d7a91", "#2b2d42", "#1d2026", "#8a909c"
COLOURS = {"refold": OURS, "torch.compile": PEER, "mamba-ssm": PEER, "eager": EAGER}
STYLE: Any = {
    "font.size": 9, "axes.titlesize": 10, "axes.titlelocation": "left", "axes.titleweight": "bold",
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": SOFT, "axes.labelcolor": INK,
    "xtick.color": INK, "ytick.color": INK, "text.color": INK, "axes.grid": True, "axes.grid.axis": "y",
    "grid.color": "#e3e6eb", "axes.axisbelow": True, "legend.frameon": False, "lines.linewidth": 2,
    "lines.markersize": 5, "svg.fonttype": "none", "savefig.transparent": True, "savefig.dpi": 160,
}  # fmt: skip
GPU = "nvidia-h200"
# Where a reader prefers dark pages: each colour of the figures, and what is drawn in its place.
DARK = {"#ffffff": "#15171c", INK: "#e6e8ee", EAGER: "#c3c8dc", PEER: "#95a3bd", OURS: "#f0728a", "#e3e6eb": "#343842"}


@dataclass(frozen=True)
class Plot:
    """One figure.

    Attributes:
        rows: Reads the rows that it is drawn from, out of a folder of results.
        draw: Draws them with a given ``matplotlib.pyplot``, and returns the figure.
    """

    rows: Callable[[Path], list[Row]]
    draw: Callable[[Any, list[Row]], Any]


def device(row: Row) -> str:
    """Return the name of the device that a row was measured on, for a person."""
    env = row["env"]
    if "gpu" in env and row.get("device") != "cpu":
        return env["gpu"]
    name = env["processor"].replace("(R)", "").replace(" Processor", "")
    return f"{name}, {env['threads']} {'thread' if env['threads'] == 1 else 'threads'}"


# Operators --------------------------------------------------------------------------------------


def operator_rows(results: Path) -> list[Row]:
    """Return the rows of the scans that ran in turns with the official kernels."""
    rows = stored(results, GPU, "ssd", "selective-scan")
    return [row for row in rows if isinstance(row.get("mamba_ssm_ms"), float) and "all options" not in row["case"]]


def draw_operators(plt: Any, rows: list[Row]) -> Any:
    """Draw times of the scans: ours, the official kernels', and what copying the same bytes takes."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(f"{row['op']}, {row['dtype']}", []).append(row)
    widths = [len(group) for group in groups.values()]
    figure, panels = plt.subplots(
        1, len(groups), figsize=(1.5 + 0.4 * sum(widths), 3.8), sharey=True, squeeze=False, width_ratios=widths
    )
    for panel, (title, group) in zip(panels[0], groups.items(), strict=True):
        at = range(len(group))
        ours, theirs, copy = ([row[key] for row in group] for key in ("median_ms", "mamba_ssm_ms", "copy_ms"))
        panel.vlines(at, copy, theirs, color="#e3e6eb", linewidth=5)
        panel.plot(at, theirs, "o", color=PEER, label="mamba-ssm")
        panel.plot(at, ours, "o", color=OURS, label="refold")
        panel.plot(at, copy, "_", color=INK, markersize=11, label="copy of its bytes")
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        panel.set_title(title)
        panel.set_xlabel(f"batch x tokens x {'heads' if group[0]['op'] == 'ssd' else 'channels x states'}", fontsize=8)
        panel.set_xticks(list(at), [row["case"] for row in group], rotation=60, ha="right", fontsize=7)
    panels[0][0].set_ylabel(f"ms (logarithmic), {rows[0]['env']['gpu']}")
    panels[0][-1].legend(fontsize=8, loc="upper left")
    return figure


def roofline_rows(results: Path) -> list[Row]:
    """Return operations, bytes, times and the measured limits of the device for the scans in bfloat16."""
    found = []
    limits = [row["ceiling_tflop_per_s"] for row in generation_rows(results) if "ceiling_tflop_per_s" in row]
    for row in operator_rows(results):
        sizes = dict(zip("bthd" if row["op"] == "ssd" else "btdn", map(int, row["case"].split("x")), strict=False))
        if row["dtype"] == "bfloat16" and limits:
            found.append({
                "op": row["op"], "case": row["case"], "bytes": row["bytes"], "gpu": row["env"]["gpu"],
                "flops": row.get("flops") or load(row["op"]).flops({"p": 64, "n": 128, "g": 1, **sizes}),
                "refold_ms": row["median_ms"], "mamba-ssm_ms": row["mamba_ssm_ms"],
                "tb_per_s": row["bytes"] / row["median_ms"] / row["share_of_copy"] / 1e9,
                "tflop_per_s": statistics.median(limits),
            })  # fmt: skip
    return found


def draw_roofline(plt: Any, rows: list[Row]) -> Any:
    """Draw operations per second over operations per byte, under what copying and matrix products reach."""
    figure, panel = plt.subplots(figsize=(8, 4.2))
    copy, matrix = (statistics.median(row[key] for row in rows) for key in ("tb_per_s", "tflop_per_s"))
    at = [4.0, matrix / copy, 2048.0]
    panel.plot(at, [min(x * copy, matrix) for x in at], color=INK, linewidth=1)
    panel.text(at[0], at[0] * copy * 1.25, f"copy: {copy:.2f} TB/s", fontsize=8, rotation=27, rotation_mode="anchor")
    panel.text(at[-1], matrix * 1.08, f"matrix products: {matrix:.0f} TFLOP/s", fontsize=8, ha="right")
    for op, mark in (("ssd", "o"), ("selective_scan", "s")):
        own = [row for row in rows if row["op"] == op]
        for name in ("mamba-ssm", "refold"):
            points = [(row["flops"] / row["bytes"], row["flops"] / row[f"{name}_ms"] / 1e9) for row in own]
            panel.plot(*zip(*points, strict=True), mark, color=COLOURS[name], alpha=0.75, label=f"{op}, {name}")
    panel.set(xscale="log", yscale="log", title=f"the scans under the roofline of an {rows[0]['gpu']}, bfloat16")
    panel.set(xlabel="operations of the recurrence per byte that must move", ylabel="TFLOP/s")
    panel.legend(fontsize=8, loc="lower right")
    return figure


# Layers and models ------------------------------------------------------------------------------


def published_rows(results: Path) -> list[Row]:
    """Return the rows of published results that compare times, in the order of the results; GPUs before CPUs."""
    folders = sorted(machines(results), key=lambda name: not name.startswith("nvidia"))
    rows = [row for row in everywhere(results, "published", folders=folders) if row.get("times_ms")]
    return sorted(rows, key=lambda row: list(RESULTS).index(row["result"]))


def draw_published(plt: Any, rows: list[Row]) -> Any:
    """Draw the times of each comparison: eager or Inductor where they ran, the published program, and refold."""
    figure, panel = plt.subplots(figsize=(9, 1.2 + 0.3 * len(rows)))
    for i, row in enumerate(rows):
        kinds = (("eager", "eager", EAGER, "s"), (row["rival"], "the published program", PEER, "o"),
                 (row["ours"], "refold", OURS, "o"))  # fmt: skip
        times = [(row["times_ms"][name], *look) for name, *look in kinds if row["times_ms"].get(name)]
        known = [ms for ms, *_ in times]
        panel.plot([min(known), max(known)], [i, i], color="#e3e6eb", linewidth=4, zorder=1)
        for ms, label, colour, mark in times:
            panel.plot([ms], [i], mark, color=colour, label=label, zorder=2)
        ratio = f"{float(format(row['ratio'], '.2g')):g}x" if row["ratio"] else "published program not run"
        panel.annotate(ratio, (max(known), i), xytext=(8, 0), textcoords="offset points", va="center", fontsize=7)
    _logarithmic(panel, "ms (logarithmic); the number is the published program's time over refold's")
    panel.set_xlim(right=panel.get_xlim()[1] * 3)
    names = [f"{row['result']}: {row['case']}, {row['dtype']}\n{_short(row)}" for row in rows]
    panel.set_yticks(range(len(rows)), names, fontsize=7)
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.tick_params(axis="y", length=0)
    found = dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    panel.legend(found.values(), found.keys(), fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
    return figure


def _short(row: Row) -> str:
    return f"batch {row['batch']}, {device(row)}" if "batch" in row else device(row)


def granite_rows(results: Path) -> list[Row]:
    """Return the rows of the Granite hybrid layer."""
    return [row for row in everywhere(results, "granite-layer") if row["case"] != "multiply-sum"]


def draw_granite(plt: Any, rows: list[Row]) -> Any:
    """Draw the time and the peak memory of the layer for each way of running it."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 0.8 + 0.6 * len(rows)), sharey=True, layout="constrained")
    shown = (("times_ms", "time of a call", "ms", 1), ("peak_bytes", "peak memory", "MiB", 2**20))
    for panel, (field, title, unit, scale) in zip(panels, shown, strict=True):
        for name, shift in {"eager": -0.25, "torch.compile": 0.0, "refold": 0.25}.items():
            values = [(row[field][name] / scale if name in row[field] else None) for row in rows]
            _dots(panel, values, [i + shift for i in range(len(rows))], name, "fails")
        _logarithmic(panel, f"{unit} (logarithmic)")
        panel.set_title(title)
    names = [f"{device(row)}\n{row['dtype']}, transformers {row['transformers']}" for row in rows]
    _name_lines(panels[0], names)
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=3)
    return figure


def draw_fusion(plt: Any, rows: list[Row]) -> Any:
    """Draw time and memory of the model over the batch."""
    kinds = ((8, "float32"), (8, "bfloat16"), (1, "float32"))
    figure, panels = plt.subplots(2, len(kinds), figsize=(9.5, 5), sharex=True, sharey="row")
    for time, peak, (layers, dtype) in zip(*panels, kinds, strict=True):
        own = [row for row in rows if (row["layers"], row["dtype"]) == (layers, dtype)]
        own.sort(key=lambda row: row["batch"])
        at = [row["batch"] for row in own]
        for name in ("eager", "torch.compile", "refold"):
            if all(name in row["times_ms"] for row in own):
                look = {"color": COLOURS[name], "label": name}
                time.plot(at, [row["times_ms"][name] for row in own], "o-", **look)
                peak.plot(at, [row["peak_bytes"][name] / 2**20 for row in own], "o-", **look)
        for row in own:
            ms = row["times_ms"]["refold"]
            ratio = min(other for name, other in row["times_ms"].items() if name != "refold") / ms
            where = {"textcoords": "offset points", "xytext": (0, -12), "ha": "center"}
            time.annotate(f"{ratio:.1f}x", (row["batch"], ms), **where, fontsize=7, color=OURS)
        time.set(xscale="log", yscale="log", title=f"{layers} layer{'s' * (layers > 1)}, {dtype}")
        peak.set(xscale="log", yscale="log", xlabel="batch")
        peak.set_xticks(at := [1, 2, 4, 8, 16], map(str, at))
        peak.minorticks_off()
    panels[0][0].set_ylabel(f"ms, {device(rows[0])}")
    panels[1][0].set_ylabel("peak MiB")
    for line in panels:
        for panel in line:
            panel.margins(x=0.15, y=0.2)  # room for the numbers
        line[0].yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panels[0][2].legend(fontsize=8)
    return figure


def generation_rows(results: Path) -> list[Row]:
    """Return the rows of generation, with JAX and with PyTorch."""
    return [row for row in stored(results, GPU, "generation", "decode", "prefill") if measured(row)]


def _limit_s(row: Row) -> float:
    """Return the least time that the device's measured rates allow."""
    return max(row["bytes"] / row["ceiling_gb_per_s"] / 1e9, row["flops"] / row["ceiling_tflop_per_s"] / 1e12)


# Of programs that generate text: their names in a figure, and colours. What is not listed is only in tables.
PROGRAMS = {
    "torch": ("refold", OURS),
    "torch, bfloat16": ("refold, bfloat16 states", "#d98a97"),
    "jax": ("refold, JAX", "#e0a96d"),
    "transformers, accelerated, CUDA graph": ("transformers, accelerated by refold", "#7d9d6a"),
    "mamba-ssm, CUDA graph": ("mamba-ssm, CUDA graph", PEER),
    "mamba-ssm, PyTorch convolution, CUDA graph": ("mamba-ssm, PyTorch's convolution", SOFT),
    "transformers, mamba-ssm's kernels": ("transformers, mamba-ssm's kernels", EAGER),
}


def _parts(row: Row) -> tuple[str, int, int]:
    """Return model, rows or length of the prompt, and tokens before (0 if not said) of a row of generation."""
    model, _, rest = row["case"].partition(" decode batch ")
    if rest:
        batch, _, past = rest.partition(" past ")
        return model, int(batch), int(past or 0)
    model, _, length = row["case"].partition(" prefill ")
    return model, int(length), 0


def standing(row: Row) -> tuple[str, int, int, int, str]:
    """Return where a row of generation stands in a table: by model, batch or length, and tokens before."""
    own, backend = list(PROGRAMS), row["backend"]
    return *_parts(row), own.index(backend) if backend in own else len(own), backend


def _drawn(results: Path, what: str) -> list[Row]:
    """Return the rows of decoding or prefill whose programs are in figures."""
    return [row for row in generation_rows(results) if f" {what} " in row["case"] and row["backend"] in PROGRAMS]


def decode_rows(results: Path) -> list[Row]:
    """Return the rows of decoding after short prompts."""
    rows = [row for row in _drawn(results, "decode") if _parts(row)[2] < 2048]
    return sorted(rows, key=lambda row: (*_parts(row)[:2], list(PROGRAMS).index(row["backend"])))


def draw_decode(plt: Any, rows: list[Row]) -> Any:
    """Draw tokens per second of decoding, and what the device's limits allow."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault(_parts(row)[:2], []).append(row)
    models, batches = sorted({model for model, _ in groups}), sorted({batch for _, batch in groups})
    counts = [max(len(groups.get((model, batch), [])) for batch in batches) for model in models]
    figure, panels = plt.subplots(
        len(models), len(batches), figsize=(10, 0.8 * len(models) + 0.25 * sum(counts)),
        height_ratios=[count + 1 for count in counts], squeeze=False, layout="constrained",
    )  # fmt: skip
    for model, line in zip(models, panels, strict=True):
        for batch, panel in zip(batches, line, strict=True):
            own = groups.get((model, batch), [])
            at = range(len(own))
            panel.grid(visible=False)
            panel.barh(at, [batch / _limit_s(row) for row in own], 0.8, color="#e3e6eb")
            rates = [batch / row["median_s"] for row in own]
            bars = panel.barh(at, rates, 0.5, color=[PROGRAMS[row["backend"]][1] for row in own])
            panel.bar_label(bars, [rounded(rate) for rate in rates], fontsize=7, padding=2)
            panel.set_yticks(at, [PROGRAMS[row["backend"]][0] for row in own], fontsize=7)
            panel.tick_params(axis="x", labelsize=7)
            panel.locator_params(axis="x", nbins=5)
            panel.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
            panel.invert_yaxis()
            panel.set_title(f"{model}, {batch} row{'s' * (batch > 1)}", fontsize=9)
    figure.supxlabel(f"tokens per second, {device(rows[0])}; grey: what the measured rates allow", fontsize=8)
    return figure


def draw_prefill(plt: Any, rows: list[Row]) -> Any:
    """Draw tokens per second and memory over the length of a prompt."""
    models = sorted({_parts(row)[0] for row in rows})
    figure, panels = plt.subplots(
        2, len(models), figsize=(2.6 * len(models) + 1, 5.2), sharex=True, sharey="row", squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for rates, memory, model in zip(*panels, models, strict=True):
        own = [row for row in rows if _parts(row)[0] == model]
        for backend, (name, colour) in PROGRAMS.items():
            line = [row for row in own if row["backend"] == backend]
            at = [_parts(row)[1] for row in line]
            if line:
                rates.plot(at, [_parts(row)[1] / row["median_s"] for row in line], "o-", color=colour, label=name)
            if line and all("extra_gib" in row for row in line):
                memory.plot(at, [row["extra_gib"] for row in line], "o-", color=colour)
        if not memory.lines:
            memory.text(0.5, 0.5, "memory was not measured", fontsize=8, ha="center", transform=memory.transAxes)
        limit = {_parts(row)[1]: _parts(row)[1] / _limit_s(row) for row in own}
        rates.plot(list(limit), list(limit.values()), "--", color=INK, linewidth=1, label="measured matrix rate")
        rates.set(xscale="log", yscale="log", title=model)
        memory.set(xscale="log", yscale="log", xlabel="tokens of the prompt")
        lengths = sorted({_parts(row)[1] for row in rows})
        memory.set_xticks(lengths, [f"{length // 1024}K" for length in lengths])
        memory.minorticks_off()
    panels[0][0].set_ylabel(f"tokens per second, {device(rows[0])}")
    panels[1][0].set_ylabel("GiB beyond the weights")
    handles = {label: one for panel in panels[0] for one, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles, fontsize=8, loc="outside lower center", ncols=3)
    return figure


# Gradients and accuracy --------------------------------------------------------------------------


def gradient_rows(results: Path) -> list[Row]:
    """Return the rows of results and gradients of operators together, without further options."""
    rows = stored(results, GPU, "ssd-backward", "selective-scan-backward", "pointwise-backward")
    return [row for row in rows if isinstance(row.get("both_ms"), float) and "options" not in row["case"]]


def draw_gradients(plt: Any, rows: list[Row]) -> Any:
    """Draw time and memory of forward and backward together."""
    rows = sorted(rows, key=lambda row: (row["op"], -row["both_ms"]))
    both = any(isinstance(row.get("mamba_ssm_both_ms"), float) for row in rows)
    figure, panels = plt.subplots(1, 2, figsize=(9, 0.9 + (0.5 if both else 0.28) * len(rows)), sharey=True)
    fields = (("both_ms", "mamba_ssm_both_ms", "ms"), ("extra_gib", "mamba_ssm_extra_gib", "GiB beyond the arguments"))
    for panel, (ours, theirs, unit) in zip(panels, fields, strict=True):
        panel.grid(visible=False)
        for name, key, shift in (("mamba-ssm", theirs, -0.2), ("refold", ours, 0.2)):
            own = [
                (i + shift * isinstance(row.get(theirs), float), row[key])
                for i, row in enumerate(rows) if isinstance(row.get(key), float)
            ]  # fmt: skip
            if own:
                where, values = zip(*own, strict=True)
                bars = panel.barh(where, values, 0.38, color=COLOURS[name], label=name)
                panel.bar_label(bars, [rounded(value) for value in values], fontsize=7, padding=2)
        panel.set_xlabel(unit)
    panels[0].set_yticks(range(len(rows)), [f"{row['op']} {row['case']}" for row in rows], fontsize=8)
    panels[0].invert_yaxis()
    dtypes = ", ".join(sorted({row["dtype"] for row in rows}))
    panels[0].set_title(f"forward and backward, {dtypes}, {rows[0]['env']['gpu']}")
    panels[1].legend(fontsize=8)
    return figure


def draw_accuracy(plt: Any, rows: list[Row]) -> Any:
    """Draw the errors of all results and gradients against float64, in units of the dtype's rounding."""
    roundoff = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
    rows = [row for row in rows if row["dtype"] in roundoff]
    names = list(dict.fromkeys(row["op"] for row in rows))
    figure, panel = plt.subplots(figsize=(8, 3.4))
    marks = {"float32": ("o", EAGER, -0.22), "float16": ("s", PEER, 0.0), "bfloat16": ("^", OURS, 0.22)}
    for dtype, (mark, colour, shift) in marks.items():
        points = [
            (names.index(row["op"]) + shift, error / roundoff[dtype])
            for row in rows if row["dtype"] == dtype for error in row["errors"].values() if error
        ]  # fmt: skip
        if points:
            panel.plot(*zip(*points, strict=True), mark, color=colour, alpha=0.6, markersize=4, label=dtype)
    panel.axhline(1, color=INK, linewidth=1)
    panel.set_xlim(-0.45, len(names) - 0.05)
    panel.text(len(names) - 0.05, 1, "one rounding", fontsize=7, va="bottom", ha="right")
    panel.set_xticks(range(len(names)), names, rotation=25, ha="right")
    panel.set(yscale="log", title="errors of results and gradients, Triton kernels")
    panel.set_ylabel("largest error / largest value,\nin units of one rounding")
    panel.legend(fontsize=8, ncols=3)
    return figure


def _dots(panel: Any, values: Sequence[float | None], at: Sequence[float], program: str, missing: str) -> None:
    """Draw the values of a program as dots with their numbers: a bar would have no beginning on a logarithmic axis."""
    label = program.replace("_", "-")
    known = [(value, y) for value, y in zip(values, at, strict=True) if value is not None]
    panel.plot(*zip(*known, strict=True), "o", color=COLOURS[program], label=label)
    for value, y in zip(values, at, strict=True):
        text, x, kind = (f"{label} {missing}", 0, panel.get_yaxis_transform()) if value is None else (
            rounded(value), value, panel.transData)  # fmt: skip
        panel.annotate(text, (x, y), xycoords=kind, xytext=(6, 0), textcoords="offset points", fontsize=7, va="center",
                       color=COLOURS[program] if value is None else INK)  # fmt: skip


# Ranks ------------------------------------------------------------------------------------------


def draw_scale(plt: Any, rows: list[Row]) -> Any:
    """Draw weak scaling and strong scaling as measured, and weak scaling over many hosts on paper."""
    figure, panels = plt.subplots(1, 3, figsize=(10, 3.8), layout="constrained")
    weak, strong, paper = panels
    found = scale_model.groups(rows)
    colours = dict(zip(dict.fromkeys(calls[0].op for calls in found), (PEER, OURS, EAGER), strict=True))
    for calls in found:
        name, kind = calls[0].op, calls[0].kind
        look = {"color": colours[name], "label": f"{name}, {kind}"}
        look |= {"marker": "o", "linestyle": "-" if kind == "forward" else ":"}
        most = max(each.ranks for each in calls)
        wide = [each for each in calls if each.ranks == most and each.weak is not None]
        weak.plot([each.tokens for each in wide], [100 * (each.weak or 0) for each in wide], **look)
        whole = [each for each in calls if each.ranks * each.tokens == 131072 * most and each.strong is not None]
        strong.plot(
            [1, *(each.ranks for each in whole)], [1, *(each.ranks * (each.strong or 0) for each in whole)], **look
        )
        ranks = [2**i for i in range(1, 11)]
        paper.plot(ranks, [100 * scale_model.on_paper(calls, 131072, n)[1] for n in ranks], **look | {"marker": ""})
    tokens = [16384 * 4**i for i in range(4)]
    weak.set(xscale="log", title=f"weak: {most} GPUs over one, %", xlabel="tokens of a rank", ylim=(0, 105))
    weak.set_xticks(tokens, [f"{n // 1024}K" for n in tokens])
    strong.plot([1, most], [1, most], color=SOFT, linewidth=1)
    strong.set(title=f"strong: {131072 * most:,} tokens", xlabel="GPUs", ylabel="times as fast as one GPU", ylim=0)
    strong.set_xticks([2**i for i in range(most.bit_length())])
    paper.set(xscale="log", title="weak on paper, %", xlabel="GPUs of different hosts, 50 GB/s each", ylim=(0, 105))
    paper.set_xticks([2, 16, 128, 1024], ["2", "16", "128", "1,024"])
    for panel in (weak, paper):
        panel.minorticks_off()
    figure.suptitle(device(rows[0]), fontsize=9, x=0.01, ha="left", color=SOFT)
    figure.legend(*weak.get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=3)
    return figure


def _logarithmic(panel: Any, label: str) -> None:
    """Give a panel of dots its logarithmic axis, with plain numbers, and room for the numbers next to the dots."""
    from matplotlib.ticker import LogLocator, NullLocator

    panel.set_xscale("log")
    panel.margins(x=0.2)
    low, high = panel.get_xlim()
    panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}" if value < 1000 else f"{value:,.0f}")
    panel.xaxis.set_minor_locator(NullLocator())
    panel.grid(visible=True, axis="x")
    panel.grid(visible=False, axis="y")
    panel.set_xlabel(label)


def _name_lines(panel: Any, names: Sequence[str]) -> None:
    """Name the groups of dots from top to bottom, with a line between them."""
    panel.set_yticks(range(len(names)), names, fontsize=8)
    panel.set_ylim(len(names) - 0.5, -0.5)
    for each in panel.figure.axes:
        each.tick_params(axis="y", length=0)
        for i in range(1, len(names)):
            each.axhline(i - 0.5, color="#e3e6eb", linewidth=1)


PLOTS = {
    "published": Plot(published_rows, draw_published),
    "operators": Plot(operator_rows, draw_operators),
    "roofline": Plot(roofline_rows, draw_roofline),
    "granite_layer": Plot(granite_rows, draw_granite),
    "fusion_example": Plot(
        lambda results: [row for row in stored(results, GPU, "fusion-example") if row["case"] == "fused_mamba"],
        draw_fusion,
    ),
    "decode": Plot(decode_rows, draw_decode),
    "prefill": Plot(lambda results: sorted(_drawn(results, "prefill"), key=standing), draw_prefill),
    "gradients": Plot(gradient_rows, draw_gradients),
    "scale": Plot(lambda results: scale_model.rows(results, GPU), draw_scale),
    "accuracy": Plot(
        lambda results: json.loads((results / "numerics" / "triton-cuda.json").read_text())["rows"], draw_accuracy
    ),
}
"""By the names of their files."""


def stamp(rows: Iterable[Row]) -> str:
    """Return the line that tells which rows a figure shows."""
    digest = hashlib.sha256(json.dumps(list(rows), sort_keys=True).encode()).hexdigest()
    return f"<!-- drawn from rows {digest} -->\n"


def stale(results: Path, out: Path) -> list[str]:
    """Return the names of figures that are missing, or drawn from other rows than are stored."""
    found = []
    for name, plot in PLOTS.items():
        path = out / f"{name}.svg"
        rows = plot.rows(results)
        if rows and not (path.exists() and path.read_text().endswith(stamp(rows))):
            found.append(name)
    return found


def _themed(svg: str) -> str:
    """Return a figure whose colours follow the reader's preference for light or dark pages."""
    rules = "".join(
        f'[style*="{kind}: {light}"]{{{kind}:{dark} !important}}'
        for light, dark in DARK.items() for kind in ("fill", "stroke")
    )  # fmt: skip
    return svg.replace("</style>", f"@media (prefers-color-scheme: dark){{{rules}}}</style>", 1)


def draw(name: str, results: Path, out: Path, png: bool = False) -> list[Path]:
    """Draw a figure as SVG, and as PNG if asked for; return the files, none if there are no rows.

    Raises:
        ArgumentError: There is no such figure.
        MissingDependency: matplotlib is not installed.
    """
    if name not in PLOTS:
        raise ArgumentError(f"there is no figure {name!r}. There are {', '.join(PLOTS)}")
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise MissingDependency("drawing needs matplotlib (pip install matplotlib)") from error
    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plot = PLOTS[name]
    if not (rows := plot.rows(results)):
        return []
    out.mkdir(parents=True, exist_ok=True)
    with plt.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = plot.draw(plt, rows)
        path = out / f"{name}.svg"
        # The bytes depend on nothing but what was drawn.
        figure.savefig(path, bbox_inches="tight", metadata={"Date": None, "Creator": None})
        path.write_text(_themed(path.read_text()) + stamp(rows))
        if png:
            figure.savefig(path.with_suffix(".png"), bbox_inches="tight")
        plt.close(figure)
    return [path, path.with_suffix(".png")] if png else [path]
