"""Rows of measurements: their environment, and how they are written, read and compared."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..errors import ArgumentError

Row = dict[str, Any]
SCHEMA = 3
_PACKAGES = ("torch", "triton", "numba", "jax", "transformers", "mamba-ssm")
# What says which measurement a row is; older rows have no suite.
_IDENTITY = ("suite", "benchmark", "op", "pass", "backend", "case", "returns", "dtype", "batch", "tokens", "steps",
             "layers", "example")  # fmt: skip


def environment() -> dict[str, Any]:
    """Say where numbers come from: versions, revision, processor, threads, and the GPU if there is one."""
    import torch

    from .. import __version__

    found: dict[str, Any] = {"refold": __version__, "revision": revision(), "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    found |= {"processor": processor(), "threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return found


def revision() -> str:
    """Return the git hash of the source; an exported tree has it in the environment variable ``REFOLD_REVISION``."""
    if given := os.environ.get("REFOLD_REVISION"):
        return given
    here = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=False
        )
    except OSError:  # no git
        return "unknown"
    return found.stdout.strip() or "unknown"


def processor() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if "model name" in line), platform.machine())


def complete(row: Row, suite: str, command: str, env: Mapping[str, Any]) -> Row:
    """Add to a measurement what every row has."""
    today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    return {"schema": SCHEMA, "suite": suite, **row, "command": command, "date": today, "env": dict(env)}


def append(path: Path, row: Row) -> None:
    """Write one more line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def read(path: Path) -> list[Row]:
    """Read a JSONL file.

    Raises:
        ArgumentError: It cannot be read, or a line is not a JSON object.
    """
    advice = "Give a file that `refold bench run --out` wrote"
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ArgumentError(f"{path} cannot be read: {error.strerror}. {advice}") from error
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ArgumentError(f"{path}:{number} is not JSON ({error}). {advice}") from error
        if not isinstance(row, dict):
            raise ArgumentError(f"{path}:{number} is {line[:40]!r}, not a JSON object. {advice}")
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


def identity(row: Row) -> tuple[tuple[str, str], ...]:
    """Return what a row measures: rows with the same identity can be compared."""
    return tuple((key, str(row[key])) for key in _IDENTITY if key in row and row[key] is not None)


def compare(before: list[Row], after: list[Row]) -> list[tuple[str, str, float, float]]:
    """Pair the times of two runs: (what, which time, milliseconds before, milliseconds after).

    If a file has several rows of one identity, the last one counts.
    """
    old = {identity(row): row for row in before}
    found = []
    for key, row in {identity(row): row for row in after}.items():
        if key in old:
            a, b = times_ms(old[key]), times_ms(row)
            name = " ".join(value for _, value in key)
            found += [(name, which, a[which], b[which]) for which in b if which in a]
    return found
