"""The report as one page: HTML with its pictures inside, no scripts and no network.

The template is ``page.html`` next to this file. This module computes what the template shows, coordinates of the
roofline included.
"""

from __future__ import annotations

import linecache
import math
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import jinja2

from .model import Contents, GraphReport, RewriteReport
from .text import alone, count, headline, milliseconds, nothing, place, scientific, size, speed

# Lines of the user's file that are shown before and after the line that was rewritten.
AROUND = 2
COLOURS = {"eager": "eager", "torch.compile": "peer", "refold": "ours"}
# The plotting area of the roofline: left, top, right, bottom, in units of its picture.
LEFT, TOP, RIGHT, BOTTOM = 58, 14, 406, 234
LINE = 24  # what a line of text takes there, with some room


def render(report: Contents) -> str:
    """Return the page."""
    return _template().render(
        report=report,
        graphs=[_graph(graph, report.ceilings) for graph in report.graphs],
        size=size,
        count=count,
        milliseconds=milliseconds,
        nothing=nothing(report),
        alone=alone,
        scientific=scientific,
        environment=" · ".join(f"{name} {value}" for name, value in report.environment.items()),
    )


@cache
def _template() -> jinja2.Template:
    text = resources.files(__package__).joinpath("page.html").read_text()
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(text)


def _graph(graph: GraphReport, ceilings: dict[str, float]) -> dict[str, Any]:
    """Choose the facts of a graph that the page shows."""
    missing = ", ".join(who for who in graph.times_ms if who not in graph.peak_bytes)
    return {
        "data": graph,
        "verdict": _verdict(graph),
        "speed": speed(graph),
        "times": _bars(graph.times_ms, milliseconds),
        "memory": _bars(graph.peak_bytes, size),
        "memory_note": f"Measuring it would take too long: {missing}." if missing else "",
        "kernels": _bars({who: sum(k["count"] for k in found) for who, found in graph.kernels.items()}, str),
        "roofline": _roofline(graph, ceilings),
        "kept": [(row, _excerpt(row)) for row in graph.rewrites if row.status != "refused"],
        "refused": [(row, _excerpt(row)) for row in graph.rewrites if row.status == "refused"],
    }


def _verdict(graph: GraphReport) -> str:
    """Say in one sentence what came out."""
    if graph.chosen == "refold":
        return headline(graph)
    if found := sum(row.status == "found" for row in graph.rewrites):
        return f"{found} {'rewrite was' if found == 1 else 'rewrites were'} found; nothing was changed"
    return f"left as it was: {headline(graph)}"


def _bars(values: dict[str, Any], text: Any) -> list[dict[str, Any]]:
    """Return a row for each program: name, value, and length of its bar as a percentage of the longest."""
    longest = max(values.values(), default=0) or 1
    return [
        {"name": name, "text": text(value), "percent": round(100 * value / longest, 2), "colour": COLOURS[name]}
        for name, value in values.items()
    ]


def _excerpt(row: RewriteReport) -> dict[str, Any]:
    """Return the user's lines around a rewrite; the line alone if its file cannot be read."""
    found = re.match(r"(.*?):(\d+)(?:: (.*))?$", row.source)
    if found is None:
        return {"where": place(row.source), "lines": []}
    path, number, code = found[1], int(found[2]), found[3] or ""
    around = [(n, linecache.getline(path, n).rstrip("\n")) for n in range(number - AROUND, number + AROUND + 1)]
    if code not in dict(around).get(number, ""):  # the file is gone, or was changed since
        around = [(number, code)]
    while not around[-1][1].strip() and around[-1][0] > number:
        around.pop()
    return {"where": place(f"{path}:{number}"), "lines": [(n, line, n == number) for n, line in around if n > 0]}


@dataclass(frozen=True)
class _Scale:
    """A logarithmic axis from ``low`` to ``high`` that is drawn from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self) -> list[tuple[float, str]]:
        powers = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
        step = 1 + len(powers) // 7
        return [(self(10.0**power), _power(power)) for power in powers[::step]]


def _power(power: int) -> str:
    text = count(10.0**power).strip()
    return text if 0 <= power < 15 else f"{10.0**power:g}"


def _name_below(name: str, at: dict[str, tuple[float, float, float]]) -> bool:
    """Tell whether a name stands below its point: eager's does, and refold's if the roof would cross it above.

    Args:
        name: The program.
        at: Where each program's point is, and the height of the roof there.
    """
    _, y, roof = at[name]
    free = all(abs(y - other) > LINE for who, (_, other, _) in at.items() if who != name)
    return name == "eager" or (free and 0 <= y - roof < LINE)


def _roofline(graph: GraphReport, ceilings: dict[str, float]) -> dict[str, Any] | None:
    """Return the picture of the roofline: the device's limits, and the graph before and after; None if not measured."""
    work = {"eager": (graph.flops_before, graph.bytes_before), "refold": (graph.flops_after, graph.bytes_after)}
    points = {
        name: (flops / moved, flops / (graph.times_ms[name] / 1e3))
        for name, (flops, moved) in work.items()
        if name in graph.times_ms and flops and moved
    }
    if not ceilings or not points:
        return None
    rate, peak = ceilings["bytes_per_s"], ceilings["flops_per_s"]
    ridge = peak / rate
    low = min([ridge, *(x for x, _ in points.values())]) / 8
    high = max([ridge, *(x for x, _ in points.values())]) * 8
    across = _Scale(low, high, LEFT, RIGHT)
    bottom = min([low * rate, *(y for _, y in points.values())]) / 3
    up = _Scale(bottom, peak * 3, BOTTOM, TOP)
    at = {name: (across(x), up(y), up(min(peak, x * rate))) for name, (x, y) in points.items()}
    return {
        "roof": [(across(low), up(low * rate)), (across(ridge), up(peak)), (across(high), up(peak))],
        "points": [
            {"name": name, "x": at[name][0], "y": at[name][1], "colour": COLOURS[name], "intensity": x, "rate": y,
             "share": y / min(peak, x * rate), "below": _name_below(name, at)}
            for name, (x, y) in points.items()
        ],
        "across": across.ticks(),
        "up": up.ticks(),
        "rate": rate,
        "peak": peak,
        "box": (LEFT, TOP, RIGHT, BOTTOM),
    }  # fmt: skip
