"""KernelBench's problems, compiled by refold: which get a rewrite, whether it is right, and what it gains.

    refold bench run kernelbench --set folder=KernelBench --set find=true --out FILE      # by their shapes alone
    refold bench run kernelbench --set folder=KernelBench --set device=cuda --out FILE    # all of them, measured
    refold bench run kernelbench --set folder=KernelBench --set only=level2/14,level2/18 --out FILE --resume
    refold bench run kernelbench --set folder=KernelBench --set device=cuda --set found=ROWS --out FILE --resume

``folder`` is the folder ``KernelBench`` of a checkout of that benchmark (github.com/ScalingIntelligence/KernelBench),
with ``level1`` to ``level3``. With ``find``, nothing runs: tensors have shapes and no memory. Otherwise each problem
runs in a process of its own with a time limit, so a crash, a leak or a hang affects only that problem. ``--resume``
runs only the problems that FILE lacks. Problems are not changed. With ``found``, the rows of an earlier run with
``find``, only problems in which something was found are run, the largest saving first. For all others refold runs what
``torch.compile`` makes, and their rows say so: all problems then take minutes of a GPU. ``total`` ends a call in time.

A row has ``found`` (the rewrites, with the outcome of each), ``chosen`` (the program that runs in the end),
``times_ms`` of eager, ``torch.compile`` and refold, ``ratio`` (the faster of the first two, over refold) and ``checks``
of the whole graph against float64. Or it has ``failed`` with the reason: ``time``, ``crash``, or the exception.
"""

from __future__ import annotations

import hashlib
import json
import math
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from .fusion_example import source
from .options import check_names
from .progress import wanted
from .rows import Row

LEVELS = ("level1", "level2", "level3")


def problems(folder: Path, levels: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yield names, such as ``level2/14``, and files of problems, in order."""
    for level in levels:
        files = sorted((folder / level).glob("*_*.py"), key=lambda file: int(file.name.split("_")[0]))
        for file in files:
            yield f"{level}/{file.name.split('_')[0]}", file


def saved(rows: Path) -> dict[str, float]:
    """Read by what factor a rewrite lessens the operations of each problem; 0 where nothing was found."""
    try:
        found = [json.loads(line) for line in rows.read_text().splitlines()]
        return {
            row["example"]: max((f["flops"][0] / max(f["flops"][1], 1) for f in row["found"]), default=0.0)
            for row in found
            if row.get("benchmark") == "kernelbench" and "found" in row
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError(f"found={rows} holds no rows of this suite: {type(error).__name__}: {error}") from error


def find_one(file: Path, seconds: float) -> dict[str, Any]:
    """Say what would be rewritten in one problem, from shapes alone; return its row."""
    import torch

    import refold

    def too_long(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    start = time.perf_counter()
    try:
        torch.compiler.reset()
        with torch.device("meta"), torch.no_grad():
            problem = source(str(file))
            arguments = problem.get_init_inputs()
            module = problem.Model(**arguments) if isinstance(arguments, dict) else problem.Model(*arguments)
            report = refold.explain(module.eval(), *problem.get_inputs())
        return {"found": _rows(report), "seconds": round(time.perf_counter() - start, 2)}
    except TimeoutError:
        return {"failed": "time", "seconds": seconds}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def measure(file: Path, device: str) -> dict[str, Any]:
    """Run one problem in this process; return its row."""
    import torch

    import refold
    from refold.targets import check_runs, load

    start = time.perf_counter()
    module, inputs = load(str(file), device=device, dtype="float32", seed=0)
    with torch.no_grad():
        check_runs(file.name, module, inputs)
        compiled = refold.compile(module, cache=False)
        compiled(*inputs)
    report = compiled.report
    graphs = report.graphs
    timed = [graph.times_ms for graph in graphs if graph.times_ms]
    names = [name for name in ("eager", "torch.compile", "refold") if timed and all(name in one for one in timed)]
    times = {name: sum(one[name] for one in timed) for name in names}
    rivals = [times[name] for name in names if name != "refold"]
    return {
        "found": _rows(report),
        "chosen": [graph.chosen for graph in graphs],
        "reason": [graph.reason for graph in graphs],
        "times_ms": times,
        "ratio": min(rivals) / times["refold"] if rivals and times.get("refold") else None,
        "at_least": [graph.speedup_at_least for graph in graphs],
        "checks": [check for graph in graphs for check in graph.checks],
        "seconds": round(time.perf_counter() - start, 2),
        "environment": report.environment,
    }


def _rows(report: Any) -> list[dict[str, Any]]:
    rows = [row for graph in report.graphs for row in graph.rewrites]
    return [{"pass": r.name, "detail": r.detail, "status": r.status, "reason": r.reason,
             "flops": [r.flops_before, r.flops_after]} for r in rows]  # fmt: skip


def run_one(file: Path, device: str, seconds: float) -> dict[str, Any]:
    """Run one problem in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "problem.py"  # reports name it so
        path.write_text(file.read_text())
        command = [sys.executable, "-m", __name__, str(path), device]
        start = time.perf_counter()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            return {"failed": "time", "seconds": seconds}
        wall = round(time.perf_counter() - start, 2)
        try:
            return {**json.loads((done.stdout.splitlines() or [""])[-1]), "wall_s": wall}
        except ValueError:
            said = " ".join(done.stderr.split())[-300:]
            return {"failed": f"crash ({done.returncode}): {said}", "seconds": wall}


def kernelbench(
    *, folder: str = "KernelBench", device: str = "cpu", find: bool = False, levels: tuple[str, ...] = LEVELS,
    only: tuple[str, ...] = ("",), found: str = "", seconds: float = 180.0, total: float = math.inf,
) -> Iterator[Row]:  # fmt: skip
    """Time all problems of KernelBench: which get a rewrite, are right, and are faster.

    Args:
        folder: The folder ``KernelBench`` of a checkout.
        device: Where to run.
        find: Say what would be rewritten, from shapes alone; run and time nothing.
        levels: Folders of problems.
        only: Problems such as ``level2/14``; all if empty.
        found: Rows of a run with ``find``; problems in which nothing was found are not run.
        seconds: Limit of time for one problem.
        total: Start no more problems after so many seconds.
    """
    check_names("kernelbench: levels", levels, LEVELS)
    for level in levels:
        if not (Path(folder) / level).is_dir():
            raise ArgumentError(
                f"kernelbench: {folder} has no folder {level}. Give --set folder=PATH, of a checkout of KernelBench"
            )
    gains = saved(Path(found)) if found else {}
    start = time.perf_counter()
    chosen = dict(problems(Path(folder), levels))
    if any(only):
        if unknown := [name for name in only if name not in chosen]:
            raise ArgumentError(
                f"kernelbench: only is {unknown[0]!r}. Give problems of the levels, such as {next(iter(chosen))}"
            )
        chosen = {name: chosen[name] for name in only}
    for name, file in sorted(chosen.items(), key=lambda one: -gains.get(one[0], 1.0)):
        content = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        what = {"example": name, "case": f"{content} {'find' if find else device} 1"}  # 1: at its own sizes
        if not wanted(**what):
            continue
        if gains.get(name) == 0.0:
            why = "nothing is found in it, so that refold runs what torch.compile makes"
            row: dict[str, Any] = {"found": [], "skipped": why}
        elif time.perf_counter() - start > total:
            continue
        else:
            row = find_one(file, seconds) if find else run_one(file, device, seconds)
        wrong = [check["kind"] for check in row.get("checks", []) if not check["passed"]]
        refused = {"refused": f"not equal: {', '.join(wrong)}"} if wrong else {}
        yield {"benchmark": "kernelbench", **what, "file": file.name, "device": device, **row, **refused}


def main(file: str, device: str) -> None:
    """Run one problem and write its row."""
    try:
        row = measure(Path(file), device)
    except Exception as error:
        row = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
