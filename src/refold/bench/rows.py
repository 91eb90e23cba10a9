"""Rows of measurements: their environment, and how they are written, read and compared."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..doctor import installed
from ..errors import ArgumentError

Row = dict[str, Any]
SCHEMA = 3
_ADVICE = "Give a file that `refold bench run --out` wrote"
_PACKAGES = ("torch", "triton", "numba", "jax", "transformers", "mamba-ssm")
# What says which measurement a row is.
_IDENTITY = ("suite", "op", "pass", "backend", "example", "case", "transformers", "dtype", "batch", "tokens", "steps",
             "layers", "width", "heads", "channels", "result")  # fmt: skip
# Times of a row that are not those of a program that does the same.
LIMITS = ("copy", "graph", "refold, both", "mamba-ssm, both")


def environment() -> dict[str, Any]:
    """Say where numbers come from: versions, revision, processor, threads, and the GPU if there is one."""
    import torch

    from .. import __version__
    from ..compiler.environment import processor

    found: dict[str, Any] = {"refold": __version__, "revision": revision(), "python": platform.python_version()}
    found |= {**installed(_PACKAGES), "processor": processor(), "threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return found


def revision(file: Path = Path(__file__)) -> str:
    """Return the git hash of the source, with ``-dirty`` if tracked files differ from it.

    An exported tree has it in the environment variable ``REFOLD_REVISION``. Of an installed package it is unknown, even
    if it lies in the folder of another repository.
    """
    if given := os.environ.get("REFOLD_REVISION"):
        return given

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(command, cwd=file.parent, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", file.name)
        return git("describe", "--always", "--dirty", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):  # no git, or not in it
        return "unknown"


def complete(row: Row, suite: str, device: str, command: str, env: Mapping[str, Any]) -> Row:
    """Add to a measurement what every row has."""
    today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    return {
        "schema": SCHEMA,
        "suite": suite,
        "device": device,
        **row,
        "command": command,
        "date": today,
        "env": dict(env),
    }


def check_writable(path: Path) -> None:
    """Make sure that rows can be written to a file, before they are measured.

    Raises:
        ArgumentError: They cannot.
    """
    existed = path.exists()
    _append(path, "")
    if not existed:
        path.unlink()


def append(path: Path, row: Row) -> None:
    """Write one more line.

    Raises:
        ArgumentError: The file cannot be written.
    """
    _append(path, json.dumps(row) + "\n")


def _append(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(text)
    except OSError as error:
        raise ArgumentError(f"{path} cannot be written: {error.strerror}. Name another file with --out") from error


def read(path: Path) -> list[Row]:
    """Read a JSONL file.

    Raises:
        ArgumentError: It cannot be read, or a line is not a JSON object.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ArgumentError(f"{path} cannot be read: {error.strerror}. {_ADVICE}") from error
    except UnicodeDecodeError as error:
        raise ArgumentError(f"{path} is not text in UTF-8. {_ADVICE}") from error
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ArgumentError(f"{path}:{number} is not JSON ({error}). {_ADVICE}") from error
        if not isinstance(row, dict):
            raise ArgumentError(f"{path}:{number} is {line[:40]!r}, not a JSON object. {_ADVICE}")
        rows.append(row)
    return rows


def described(row: Row) -> str:
    """Return a row as one line for a person: its numbers and short texts."""
    parts = []
    for name, value in row.items():
        if isinstance(value, float):
            parts.append(f"{name}={value:.4g}")
        elif isinstance(value, dict) and value and all(isinstance(x, int | float) for x in value.values()):
            parts.append(f"{name}=(" + ", ".join(f"{key} {x:.4g}" for key, x in value.items()) + ")")
        elif isinstance(value, str | int) or value is None:
            parts.append(f"{name}={value}")
    return " ".join(parts)


def times_ms(row: Row) -> dict[str, float]:
    """Return a row's times in milliseconds, by what was timed; rows of all schemas."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        scale = 1e3 if key.endswith("_s") else 1.0
        if key.endswith(("_ms", "_s")):
            each = {f"{name} {key}": x for name, x in value.items()} if isinstance(value, dict) else {key: value}
            found |= {name: x * scale for name, x in each.items() if isinstance(x, int | float)}
    return {name: x for name, x in found.items() if math.isfinite(x) and x > 0}


def by_program(row: Row) -> dict[str, Any]:
    """Return the times of a row in milliseconds, by program; in place of a time, why there is none."""
    for field in ("times_ms", "median_ms"):
        if isinstance(row.get(field), dict):
            return dict(row[field])
    names = {"median_ms": "refold", "both_ms": "refold, both", "mamba_ssm_ms": "mamba-ssm",
             "mamba_ssm_both_ms": "mamba-ssm, both", "fused_ms": "fused", "fla_ms": "fla",
             "fla_both_ms": "fla, both", "copy_ms": "copy",
             "graph_ms": "graph"}  # fmt: skip
    return {name: row[field] for field, name in names.items() if row.get(field) is not None}


def identity(row: Row) -> tuple[tuple[str, str], ...]:
    """Identify a measurement: rows with the same identity can be compared."""
    return tuple((key, str(row[key])) for key in _IDENTITY if key in row and row[key] is not None)


def machine(row: Row) -> str:
    """Return the name of the machine that a row was measured on: ``nvidia-h200``, or ``amd-epyc-2-threads``.

    Raises:
        ArgumentError: The row does not say.
    """
    env = row.get("env")
    if not (isinstance(env, dict) and "suite" in row and ("gpu" in env or {"processor", "threads"} <= env.keys())):
        raise ArgumentError(f"a row does not say its suite and machine: {described(row)[:80]}. {_ADVICE}")
    if "gpu" in env and row.get("device") != "cpu":
        name = env["gpu"]
    else:
        name = re.sub(r"\(.*?\)|@.*|,.*|\b(processor|cpu)\b", " ", env["processor"], flags=re.IGNORECASE)
        name += f" {env['threads']} {'thread' if env['threads'] == 1 else 'threads'}"
    return "-".join(re.findall(r"[a-z0-9.]+", name.lower()))


def rounded(value: float) -> str:
    """Return a number with three digits, or more if it has more before the point; zeros at the end count as digits."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


def place(results: Path, folder: str, suite: str) -> Path:
    """Return the file of a folder of results that holds the rows of a machine and a suite."""
    return results / folder / f"{suite.replace('-', '_')}.jsonl"


def store(new: Iterable[Row], results: Path) -> dict[Path, tuple[int, int, int]]:
    """Put rows where figures and tables find them, in place of older rows of the same measurement.

    What was not run does not replace what was measured, and a row of an earlier day does not replace a later one.
    Absolute paths lose their folders, which only the machine had.

    Returns:
        For each file: how many rows were replaced, how many were added, and how many others it has.
    """
    files: dict[Path, list[Row]] = {}
    for row in new:
        files.setdefault(place(results, machine(row), row["suite"]), []).append(row)
    counts = {}
    for path, rows in files.items():
        old = {identity(row): row for row in (read(path) if path.exists() else [])}
        found, kept = dict(old), set(old)
        for row in rows:
            key = identity(row)
            before = found.get(key)
            if before and (row.get("date", "") < before.get("date", "") or (measured(before) and not measured(row))):
                continue
            found[key] = row
            kept.discard(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(without_folders(json.dumps(row)) + "\n" for row in found.values()))
        replaced = len(old) - len(kept)
        counts[path] = (replaced, len(found) - len(old), len(kept))
    return counts


def without_folders(text: str) -> str:
    """Return a text whose absolute paths are names of files, or of files in an installed package."""
    return re.sub(r"(?<![\w.:/])/(?:[\w.+-]+/)+(?=[\w.+-])", lambda found: _installed(found[0]), text)


def _installed(folder: str) -> str:
    return folder.partition("/site-packages/")[2]


def stored(results: Path, folder: str, *suites: str) -> list[Row]:
    """Return the stored rows of suites; none of a suite that was not stored."""
    paths = (place(results, folder, suite) for suite in suites)
    return [row for path in paths if path.exists() for row in read(path)]


def machines(results: Path) -> list[str]:
    """Return the folders of machines whose rows are stored."""
    return sorted(path.name for path in results.iterdir() if path.is_dir())


def everywhere(results: Path, *suites: str, folders: Iterable[str] = ()) -> list[Row]:
    """Return the stored rows of suites from some machines, or from all."""
    return [row for folder in folders or machines(results) for row in stored(results, folder, *suites)]


def measured(row: Row) -> bool:
    """Tell whether a row is a measurement, and not only the reason why there is none."""
    return not any(isinstance(row.get(why), str) for why in ("not_run", "skipped"))


class Pair(NamedTuple):
    """A time that two runs have in common, in milliseconds.

    Attributes:
        name: What was measured.
        which: Which time of it.
        verdict: Whether the second run is faster, slower, or neither: their 20th to 80th percentiles overlap. Empty if
            the rows do not have these.
        before: The time in the first run.
        after: The time in the second run.
    """

    name: str
    which: str
    verdict: str
    before: float
    after: float


def compare(before: list[Row], after: list[Row]) -> list[Pair]:
    """Pair the times of two runs. If a file has several rows of one identity, the last one counts."""
    old = {identity(row): row for row in before}
    found = []
    for key, row in {identity(row): row for row in after}.items():
        if key in old:
            a, b = times_ms(old[key]), times_ms(row)
            name = " ".join(value for _, value in key)
            found += [
                Pair(name, which, _verdict(a, b, which), a[which], b[which])
                for which in b
                if which in a and not which.endswith(("p20_ms", "p80_ms"))
            ]
    return found


def _verdict(a: Mapping[str, float], b: Mapping[str, float], which: str) -> str:
    low, high = (re.sub("(median|times)_ms", percentile, which) for percentile in ("p20_ms", "p80_ms"))
    if low == which or not {low, high} <= a.keys() & b.keys():
        return ""
    return "faster" if b[high] < a[low] else "slower" if b[low] > a[high] else "same"
