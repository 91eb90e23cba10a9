"""KernelBench's problems through the compiler: which get a rewrite, whether it is right, and what it gains.

    python -m refold.bench kernelbench FOLDER --find                         # which ones, by their shapes alone
    python -m refold.bench kernelbench FOLDER --device cuda --out FILE       # all of them, measured
    python -m refold.bench kernelbench FOLDER --device cuda --only level2/14 level2/18

FOLDER is the folder ``KernelBench`` of a checkout of that benchmark (github.com/ScalingIntelligence/KernelBench), with
``level1`` to ``level3``. ``--find`` runs nothing: tensors have shapes and no memory. Otherwise each problem runs in a
process of its own with a limit of time, so that a crash, a leak or a hang is that problem's alone. One row a problem is
appended to FILE as it is known; a problem that has a row for this version of its file, the device and the sizes is not
run again. Nothing of a problem is changed but, with ``--shrink``, the large integers at the top of its file.

A row: ``found`` (the rewrites, with what came of each), ``chosen`` (what runs in the end), ``times_ms`` of eager, of
``torch.compile`` and of refold, ``ratio`` (the faster of the first two, over refold), ``checks`` of the whole graph
against float64, or ``failed`` with the reason: ``time``, ``crash``, or what was raised.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import hashlib
import importlib.util
import json
import math
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

LEVELS = ("level1", "level2", "level3")
SMALLEST = 64  # smaller integers are channels, kernels and the like, and stay


def problems(folder: Path, levels: Sequence[str], only: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yield names, such as ``level2/14``, and files of problems, in order."""
    for level in levels:
        files = sorted((folder / level).glob("*_*.py"), key=lambda file: int(file.name.split("_")[0]))
        for file in files:
            name = f"{level}/{file.name.split('_')[0]}"
            if not only or name in only:
                yield name, file


def shrunk(text: str, factor: int) -> str:
    """Divide the large integers that a problem's file assigns at its top; its code stays as it is."""
    if factor <= 1:
        return text
    tree = ast.parse(text)
    for node in tree.body:
        if isinstance(node, ast.Assign):
            for part in ast.walk(node.value):
                if isinstance(part, ast.Constant) and type(part.value) is int and part.value > SMALLEST:
                    part.value = max(SMALLEST, part.value // factor)
    return ast.unparse(tree)


def find(file: Path, seconds: float) -> dict[str, Any]:
    """Say what would be rewritten in one problem, from shapes alone; return its row."""
    import torch

    import refold

    def too_long(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    start = time.perf_counter()
    try:
        torch._dynamo.reset()
        with torch.device("meta"), torch.no_grad():
            spec = importlib.util.spec_from_file_location("problem", file)
            assert spec is not None
            assert spec.loader is not None
            source = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(source)
            arguments = source.get_init_inputs()
            module = source.Model(**arguments) if isinstance(arguments, dict) else source.Model(*arguments)
            report = refold.explain(module.eval(), *source.get_inputs())
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


def run_one(name: str, file: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run one problem in a process of its own."""
    if args.find:
        return find(file, args.seconds)
    command = [sys.executable, "-m", "refold.bench", "kernelbench", "--one", "--device", args.device]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "problem.py"
        path.write_text(shrunk(file.read_text(), args.shrink))
        start = time.perf_counter()
        try:
            done = subprocess.run(
                [*command, str(path)],
                capture_output=True,
                text=True,
                timeout=args.seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"failed": "time", "seconds": args.seconds}
        seconds = round(time.perf_counter() - start, 2)
        line = (done.stdout.splitlines() or [""])[-1]
        try:
            return {**json.loads(line), "wall_s": seconds}
        except ValueError:
            said = " ".join(done.stderr.split())[-300:]
            return {"failed": f"crash ({done.returncode}): {said}", "seconds": seconds}


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Say how many problems get a rewrite, are right, and are faster."""
    applied = [row for row in rows if any(one["status"] == "applied" for one in row.get("found", []))]
    found = [row for row in rows if row.get("found")]
    wrong = [row["problem"] for row in rows if any(not check["passed"] for check in row.get("checks", []))]
    ratios = [row["ratio"] for row in applied if row.get("ratio")]
    failed = [row for row in rows if "failed" in row]
    lines = [f"{len(rows)} problems: {len(found)} with a rewrite found, {len(applied)} with one that is applied, "
             f"{len(failed)} not run to the end"]  # fmt: skip
    if ratios:
        best = max(ratios)
        lines.append(f"faster than the best of eager and torch.compile: median {statistics.median(ratios):.2f}x, "
                     f"best {best:.2f}x, of {len(ratios)}")  # fmt: skip
    lines.append(f"wrong: {', '.join(wrong) or 'none'}")
    return "\n".join(lines)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(argv: Sequence[str]) -> int:
    """Run the suite, or one problem of it."""
    parser = argparse.ArgumentParser(prog="python -m refold.bench kernelbench", description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder KernelBench of a checkout")
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=LEVELS)
    parser.add_argument("--only", nargs="+", default=[], help="problems such as level2/14")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shrink", type=int, default=1, help="divide large integers at the top of each file by this")
    parser.add_argument("--find", action="store_true", help="say what would be rewritten; compile and time nothing")
    parser.add_argument("--seconds", type=float, default=180.0, help="limit of time for one problem")
    parser.add_argument("--total", type=float, default=math.inf, help="start no more problems after so many seconds")
    parser.add_argument("--out", type=Path, help="append rows to this file; problems that it has are not run again")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        try:
            row = measure(args.folder, args.device)
        except Exception as error:
            row = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        _say(json.dumps(row))
        return 0
    start, rows = time.perf_counter(), []
    old = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out and args.out.exists() else []
    known = {row["key"]: row for row in old}
    for name, file in problems(args.folder, args.levels, args.only):
        digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        key = f"{name} {digest} {args.device} {args.shrink} {'find' if args.find else 'measure'}"
        if key in known:
            rows.append(known[key])
            continue
        if time.perf_counter() - start > args.total:
            break
        row = {"suite": "kernelbench", "problem": name, "file": file.name, "key": key, "device": args.device,
               "shrink": args.shrink, "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
               **run_one(name, file, args)}  # fmt: skip
        rows.append(row)
        if args.out:
            with args.out.open("a") as out:
                out.write(json.dumps(row) + "\n")
        what = row.get("failed") or "; ".join(f"{one['pass']} {one['status']}" for one in row["found"]) or "-"
        ratio = f"  {row['ratio']:.2f}x" if row.get("ratio") else ""
        _say(f"{name:12} {file.name[:48]:48} {what[:110]}{ratio}")
    _say(summary(rows))
    return 0
