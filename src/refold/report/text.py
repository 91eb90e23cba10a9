"""The report for a terminal or a pipe."""

from __future__ import annotations

import os

from .model import Contents, GraphReport, RewriteReport

UNDECIDED = "too near to decide alone"
_MARK = {"applied": "+", "found": "*", "refused": "-"}


def render(report: Contents) -> str:
    """Return the report as plain text, at most 110 columns where the content allows."""
    lines: list[str] = []
    if report.target:
        lines.append(f"refold: {report.target}")
    if report.environment:
        lines.append("  ".join(f"{key} {entry}" for key, entry in report.environment.items()))
    if not report.graphs:
        lines.append("no graph was compiled: it was not called yet, or torch.compile found nothing in it to trace")
    for graph in report.graphs:
        lines += ["", *_graph(graph)]
    return "\n".join(lines)


def _graph(graph: GraphReport) -> list[str]:
    lines = [f"graph {graph.index} ({graph.mode}): {graph.runs} runs" + (f", {graph.reason}" if graph.reason else "")]
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
    if graph.speedup is not None:
        lines.append(f"  {_speedup(graph)}")
    if graph.difference_from_eager is not None:
        lines.append(f"  difference from eager, relative L2: {graph.difference_from_eager:.1e}")
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


def _rewrite(rewrite: RewriteReport) -> list[str]:
    state = rewrite.status + (f": {rewrite.reason}" if rewrite.reason else "")
    lines = [f"  {_MARK.get(rewrite.status, '-')} {rewrite.name} [{rewrite.site}] {state}"]
    if rewrite.source:
        lines.append(f"      at     {place(rewrite.source)}")
    lines.append(f"      what   {rewrite.detail}")
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
                f"      error  {error['kind']}: {error['error']:.1e} against float64 "
                f"(original {error['original_error']:.1e}, bound {error['bound']:.1e})"
            )
    if rewrite.candidate_ms is not None and rewrite.original_ms is not None:
        lines.append(
            f"      time   {rewrite.original_ms:.3f} ms ({rewrite.original_by}) -> {rewrite.candidate_ms:.3f} ms, "
            f"{rewrite.speedup:.2f}x, at least {rewrite.at_least:.2f}x"
            + (f"; {UNDECIDED}" if undecided(rewrite) else "")
        )
    return lines


def place(source: str) -> str:
    """Return where a rewrite was found, without the folder that this program runs in."""
    return source.removeprefix(f"{os.getcwd()}{os.sep}")


def undecided(rewrite: RewriteReport) -> bool:
    """Tell whether timing a rewrite alone left open if it is faster."""
    return rewrite.status == "applied" and rewrite.at_least is not None and rewrite.at_least < 1


def _checks(graph: GraphReport) -> str:
    """Say how the whole graph compares with the original."""
    count = len(graph.checks)
    worst = min(graph.checks, key=lambda one: (one["passed"], -one["error"] / (one["bound"] or 1.0)))
    results = "result" if count == 1 else f"results, of which {worst['kind']} is nearest to its bound"
    return (
        f"whole graph: {count} {results}: {worst['error']:.1e} against {graph.checked_against} "
        f"(original {worst['original_error']:.1e}, bound {worst['bound']:.1e})"
    )


def _speedup(graph: GraphReport) -> str:
    """Say how fast the rewritten graph is, against what was timed, and how sure that is."""
    rivals = [name for name in graph.times_ms if name != "refold"]
    against = f"the faster of {' and '.join(rivals)}" if len(rivals) > 1 else rivals[0]
    return (
        f"refold's program is {graph.speedup:.2f}x as fast as {against}, in pairs of calls "
        f"(between {graph.speedup_at_least:.2f}x and {graph.speedup_at_most:.2f}x, 99 % confidence)"
    )


def _table(graph: GraphReport) -> list[str]:
    best = min(graph.times_ms.values())
    lines = [f"  {'':14}{'ms':>12}{'vs best':>10}{'peak memory':>14}"]
    for name, time_ms in graph.times_ms.items():
        peak = size(graph.peak_bytes[name]) if name in graph.peak_bytes else "-"
        lines.append(f"  {name:14}{time_ms:12.3f}{time_ms / best:9.2f}x{peak:>14}")
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
