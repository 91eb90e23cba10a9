"""The report for a terminal or a pipe."""

from __future__ import annotations

import math
import os
from typing import Any, TypeGuard

from .model import Contents, GraphReport, RewriteReport

UNDECIDED = "too uncertain to decide alone"
_MARK = {"applied": "+", "found": "*", "refused": "-"}


def render(report: Contents) -> str:
    """Return the report as plain text, at most 110 columns where the content allows."""
    lines: list[str] = []
    if report.target:
        lines.append(f"refold: {report.target}")
    if report.environment:
        lines.append("  ".join(f"{key} {entry}" for key, entry in report.environment.items()))
    if not report.graphs:
        lines.append(nothing(report))
    for graph in report.graphs:
        lines += ["", *_graph(graph)]
    lines += [f"note: {note}" for note in report.notes]
    return "\n".join(lines)


def nothing(report: Contents) -> str:
    """Say why a report has no graph."""
    if report.notes:
        return "no graph was compiled"
    return "no graph was compiled: it was not called yet, or torch.compile found nothing in it to trace"


def _graph(graph: GraphReport) -> list[str]:
    lines = [f"graph {graph.index} ({graph.mode}): {headline(graph)}"]
    for rewrite in graph.rewrites:
        lines += _rewrite(rewrite)
    lines += [f"  ! serial loop: {loop}" for loop in graph.loops]
    if not graph.rewrites and not graph.loops:
        lines.append("  nothing to rewrite")
    if graph.rewrites:
        lines.append(
            f"  whole graph: {count(graph.flops_before)}FLOP -> {count(graph.flops_after)}FLOP, "
            f"{size(graph.bytes_before)} -> {size(graph.bytes_after)} moved when run node by node"
        )
    if graph.checks:
        lines.append(f"  {_checks(graph)}")
    if graph.times_ms:
        lines += ["", *_table(graph)]
    if told := speed(graph):
        lines.append(f"  {told}")
    if graph.difference_from_eager is not None:
        lines.append(f"  difference from eager, relative L2: {scientific(graph.difference_from_eager)}")
    if graph.remembered:
        lines.append(
            f"  remembered by {graph.remembered}: nothing was timed now; times and errors are from the first compile"
        )
    if graph.compile_s:
        line = f"  compile {graph.compile_s:.1f} s, checks and timing {graph.checks_s:.1f} s"
        rival = graph.inductor_compile_s
        lines.append(line if rival is None else f"{line}, torch.compile of the original, to be timed, {rival:.1f} s")
    lines += [f"  note: {note}" for note in graph.notes]
    return lines


def headline(graph: GraphReport) -> str:
    """Say what runs, and why."""
    certain = graph.chosen == "refold" and _known(graph.speedup_at_least) and graph.speedup_at_least > 1
    reason = graph.reason or ("because it is measurably faster" if certain else "")
    return f"{graph.runs} runs" + (f", {reason}" if reason else "")


def _rewrite(rewrite: RewriteReport) -> list[str]:
    state = rewrite.status + (f": {rewrite.reason}" if rewrite.reason else "")
    lines = [f"  {_MARK.get(rewrite.status, '-')} {rewrite.name} [{rewrite.site}] {state}"]
    if rewrite.source:
        lines.append(f"      at     {place(rewrite.source)}")
    lines.append(f"      what   {rewrite.detail}")
    if rewrite.becomes:
        lines.append(f"      now    {rewrite.becomes}")
    lines.append(f"      why    {rewrite.why}")
    lines.append(
        f"      costs  {count(rewrite.flops_before)}FLOP -> {count(rewrite.flops_after)}FLOP, "
        f"{size(rewrite.bytes_before)} -> {size(rewrite.bytes_after)} moved, "
        f"largest value {size(rewrite.largest_before)} -> {size(rewrite.largest_after)}"
    )
    for error in rewrite.errors:
        if error["kind"] == "integers":
            lines.append(f"      error  integers: {'bitwise equal' if error['passed'] else error['reason']}")
        else:
            lines.append(
                f"      error  {error['kind']}: {scientific(error['error'])} against float64 "
                f"(original {scientific(error['original_error'])}, bound {scientific(error['bound'])})"
            )
    if told := alone(rewrite):
        lines.append(f"      time   {told}")
    return lines


def alone(rewrite: RewriteReport) -> str:
    """Say how fast a rewrite is by itself; empty if it was not timed."""
    if rewrite.candidate_ms is None:
        return ""
    if not _known(rewrite.original_ms):
        return f"the original does not fit in memory -> {milliseconds(rewrite.candidate_ms)}"
    bounds = f", {between(rewrite.at_least, None)}" if _known(rewrite.at_least) else ""
    return (
        f"{milliseconds(rewrite.original_ms)} ({rewrite.original_by}) -> {milliseconds(rewrite.candidate_ms)}: "
        f"{rewrite.speedup:.2f}x as fast{bounds}" + (f"; {UNDECIDED}" if undecided(rewrite) else "")
    )


def place(source: str) -> str:
    """Return where a rewrite was found, without the folder that this program runs in."""
    return source.removeprefix(f"{os.getcwd()}{os.sep}")


def undecided(rewrite: RewriteReport) -> bool:
    """Tell whether timing a rewrite alone left open if it is faster."""
    return rewrite.status == "applied" and rewrite.candidate_ms is not None and not (rewrite.at_least or 0.0) >= 1


def _checks(graph: GraphReport) -> str:
    """Say how the whole graph compares with the original."""
    count = len(graph.checks)

    def rank(one: dict[str, Any]) -> tuple[bool, float]:
        return one["passed"], -(one["error"] if _known(one["error"]) else math.inf) / (one["bound"] or 1.0)

    worst = min(graph.checks, key=rank)
    results = "result" if count == 1 else f"results, of which {worst['kind']} is nearest to its bound"
    return (
        f"whole graph: {count} {results}: {scientific(worst['error'])} against {graph.checked_against} "
        f"(original {scientific(worst['original_error'])}, bound {scientific(worst['bound'])})"
    )


def speed(graph: GraphReport) -> str:
    """Say how fast the rewritten graph is, against what was timed, and how sure that is; empty if it was not timed."""
    if not _known(graph.speedup):
        return ""
    rivals = [name for name in graph.times_ms if name != "refold"]
    against = f"the faster of {' and '.join(rivals)}" if len(rivals) > 1 else "".join(rivals) or "the original"
    sure = f"{between(graph.speedup_at_least, graph.speedup_at_most)}, 99 % confidence"
    decides = "; the machine was too busy for this to decide" if graph.chosen == "refold" and graph.provisional else ""
    return f"refold's program is {graph.speedup:.2f}x as fast as {against}, in pairs of calls ({sure}){decides}"


def between(low: float | None, high: float | None) -> str:
    """Say between which ratios something is, as far as that is known; an unknown bound is None, infinite or 0."""
    below, above = _known(low) and low > 0, _known(high)
    if below and above:
        return f"between {low:.2f}x and {high:.2f}x"
    if below:
        return f"at least {low:.2f}x"
    return f"at most {high:.2f}x" if above else "too few calls to bound it"


def scientific(value: float | None) -> str:
    """Return an error or a bound with two digits."""
    return f"{value:.1e}" if _known(value) else "not finite"


def milliseconds(value: float) -> str:
    """Return a time with three digits."""
    return f"{value:,.0f} ms" if value >= 1000 else f"{value:.3g} ms"


def _known(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _table(graph: GraphReport) -> list[str]:
    lines = [f"  {'':14}{'ms':>12}{'peak memory':>14}"]
    for name, time_ms in graph.times_ms.items():
        peak = size(graph.peak_bytes[name]) if name in graph.peak_bytes else "-"
        lines.append(f"  {name:14}{time_ms:12.3f}{peak:>14}")
    return lines


def _scaled(value: float, step: float, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if abs(value) < step:
            return f"{value:.3g} {unit}"
        value /= step
    return f"{value:.3g} {units[-1]}"


def size(value: float) -> str:
    """Return a number of bytes with its unit."""
    return _scaled(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def count(value: float) -> str:
    """Return a number with the prefix of its unit, as in ``4.26 G``."""
    return _scaled(value, 1000, ("", "k", "M", "G", "T"))
