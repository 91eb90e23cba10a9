"""The exhaustive tests: `make test-all` runs them, and CI does when what they guard has changed since they last passed.

    python tools/exhaustive.py due      # names of groups whose guarded files differ from their stamp
    python tools/exhaustive.py run      # run those, and stamp them
    python tools/exhaustive.py run all  # run every group, and stamp it
    python tools/exhaustive.py stamp    # say that all that `make test` runs, slow tests too, passed with these files
    python tools/exhaustive.py slow     # store which tests of the last run took long (tests/slow.json)

A stamp is a digest of the guarded files, kept in ``tests/exhaustive.json`` and committed. It says that the tests of a
group passed with exactly these files. Slow tests have a stamp of all programs; where it holds, `make test` leaves them
out.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
STAMPS = ROOT / "tests" / "exhaustive.json"
SLOW = ROOT / "tests" / "slow.json"
LONG = 2
"""Seconds from which on a test is slow."""
PROGRAMS = ("src/refold", "tests", "tools", "examples")
READERS = ("tests/null/", "tests/cpu/test_", "tests/gpu/")
"""Tests that also read pages and stored results, which a stamp does not see, or that need a GPU: never left out."""
SHARED = ("src/refold/errors.py", "src/refold/versions.py", "tests/support", "tests/conftest.py")
HF = (
    *("accelerate", "awkward", "decoding", "equality", "heads", "kernel_repository"),
    *("packed_attention", "padding", "ranks", "warm"),
)
GROUPS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "attacks": (
        ("tests/adversarial",),
        ("src/refold/judge", "src/refold/verify", "tools/attacks.py", "tests/benign"),
    ),
    "trials": (
        ("tests/cpu/judge", "tests/cpu/verify", "tests/cpu/propose"),
        ("src/refold/judge", "src/refold/verify", "src/refold/propose", "src/refold/early.py", "src/refold/targets.py"),
    ),
    "rewrites": (
        ("tests/cpu/compiler", "tests/hf/test_layers.py"),
        (
            *("src/refold/ops", "src/refold/verify", "src/refold/report", "src/refold/compiler"),
            *("src/refold/integrations", "src/refold/bench/recurrences.py", "tools/fuzz.py"),
        ),
    ),
    "operators": (
        ("tests/cpu/ops", "tests/cpu/compat"),
        ("src/refold/ops", "src/refold/compat", "src/refold/parallel.py", "src/refold/cache.py"),
    ),
    "jax": (
        ("tests/cpu/jax",),
        ("src/refold/ops", "src/refold/models", "src/refold/generate", "tests/cpu/conftest.py"),
    ),
    "models": (
        ("tests/cpu/models", *(f"tests/hf/test_{name}.py" for name in HF)),
        (
            *(f"src/refold/{room}" for room in ("ops", "models", "generate", "integrations", "compat")),
            *(f"src/refold/{file}.py" for file in ("cache", "parallel", "warm", "cli")),
        ),
    ),
}
GROUPS["newest"] = (
    ("tests/hf/test_accelerate.py", "tests/hf/test_layers.py"),
    tuple(sorted({*GROUPS["rewrites"][1], *GROUPS["models"][1]})),
)
GROUPS["code"] = (
    tuple(f"tests/cpu/compiler/{name}" for name in ("test_backend.py", "test_calls.py", "validate")),
    GROUPS["rewrites"][1],
)
"""Name -> folders whose tests with the mark ``exhaustive`` belong to it, and the folders and files that they guard.

They also guard their own folders and what is `SHARED`; tests/null/test_exhaustive.py compares this with their imports.
"""
ONCE_MORE = {
    "newest": ("exhaustive", {"TORCHINDUCTOR_VEC_ISA_OK": "", "PYTHONPATH": str(ROOT / ".venv-newest")}),
    "code": ("", {"REFOLD_TESTS_CODE": "1"}),
}
"""Groups of tests that belong to another group, too -> the marks of those that run once more, and how: with the newest
transformers and vector instructions, as in the Makefile, and with Inductor's code (tests/conftest.py)."""


def guarded(name: str) -> tuple[str, ...]:
    """List the folders and files of which a change makes a group due."""
    tests, rooms = GROUPS[name]
    return (*rooms, *tests, *SHARED)


def digest(folders: Iterable[str], root: Path = ROOT) -> str:
    """Give one number for the names and contents of all Python files below some folders, or of files."""
    found = hashlib.sha256()
    given = [root / folder for folder in folders]
    for path in sorted(path for one in given for path in (one.rglob("*.py") if one.is_dir() else [one])):
        found.update(f"{path.relative_to(root).as_posix()}\0{len(path.read_bytes())}\0".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def due(stamps: Mapping[str, str], root: Path = ROOT) -> list[str]:
    """Give the groups whose guarded files are not those of their stamp."""
    return [name for name in GROUPS if stamps.get(name) != digest(guarded(name), root)]


def slow() -> dict[str, float]:
    """Read which tests are slow, and their seconds."""
    return json.loads(SLOW.read_text())


@cache
def passed() -> frozenset[str]:
    """List the slow tests, if all passed with the programs as they are now."""
    return frozenset(slow() if json.loads(STAMPS.read_text()).get("slow") == digest(PROGRAMS) else ())


def store_slow(measured: Mapping[str, float], slow: Mapping[str, float]) -> dict[str, float]:
    """Merge the tests of a run that took long into those that are known, the longest first."""
    known = {k: seconds for k, seconds in {**slow, **measured}.items() if seconds >= LONG and not k.startswith(READERS)}
    return dict(sorted(known.items(), key=lambda pair: (-pair[1], pair[0])))


def stamp(name: str, folders: Iterable[str]) -> None:
    """Write down that a group passed with its files as they are now."""
    STAMPS.write_text(json.dumps(json.loads(STAMPS.read_text()) | {name: digest(folders)}, indent=2) + "\n")


def run(names: Iterable[str]) -> int:
    """Run groups, and stamp those that pass; give pytest's exit status of the first that does not."""
    for name in names:
        marks, settings = ONCE_MORE.get(name, ("exhaustive", {}))
        status = subprocess.run(
            [sys.executable, "-m", "pytest", *GROUPS[name][0], "-m", marks, "-n", "2", "--dist", "worksteal"],
            cwd=ROOT,
            env=os.environ | settings,
        ).returncode
        if status:
            return status
        stamp(name, guarded(name))
    return 0


def main() -> int:
    """Read the command line."""
    command, every = sys.argv[1:2], sys.argv[2:] == ["all"]
    if command == ["stamp"]:
        stamp("slow", PROGRAMS)
        return 0
    if command == ["slow"]:
        measured = json.loads((ROOT / "build" / "durations.json").read_text())[1]
        SLOW.write_text(json.dumps(store_slow(measured, slow()), indent=0) + "\n")
        return 0
    waiting = list(GROUPS) if every else due(json.loads(STAMPS.read_text()))
    if command == ["run"]:
        return run(waiting)
    print("\n".join(waiting))
    return 0 if command == ["due"] else 2


if __name__ == "__main__":
    sys.exit(main())
