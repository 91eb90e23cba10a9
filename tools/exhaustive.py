"""The exhaustive tests: `make test-all` runs them, and CI does when what they guard has changed since they last passed.

    python tools/exhaustive.py due      # names of groups whose guarded files differ from their stamp
    python tools/exhaustive.py run      # run those, and stamp them
    python tools/exhaustive.py run all  # run every group, and stamp it

A stamp is a digest of the guarded files, kept in ``tests/exhaustive.json`` and committed. It says that the tests of a
group passed with exactly these files.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
STAMPS = ROOT / "tests" / "exhaustive.json"
GROUPS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "attacks": (
        ("tests/adversarial",),
        ("src/refold/judge", "src/refold/verify", "tests/adversarial", "tests/benign"),
    ),
    "rewrites": (
        ("tests/cpu/compiler",),
        ("src/refold/compiler", "src/refold/verify", "tests/cpu/compiler", "tests/support"),
    ),
    "models": (
        ("tests/hf", *(f"tests/cpu/jax/test_{name}.py" for name in ("parallel", "counts", "generate"))),
        (
            "src/refold/models",
            "src/refold/generate",
            "src/refold/integrations",
            "src/refold/warm.py",
            "tests/hf",
            "tests/cpu/jax",
            "tests/support",
        ),
    ),
    "operators": (
        ("tests/cpu/ops", "tests/cpu/jax"),
        ("src/refold/ops", "tests/cpu/ops", "tests/cpu/jax", "tests/support/products.py"),
    ),
}
"""Name -> folders whose tests with the mark ``exhaustive`` belong to it, and the folders and files that they guard."""


def digest(folders: Iterable[str], root: Path = ROOT) -> str:
    """Give one number for the names and contents of all Python files below some folders, or of files."""
    found = hashlib.sha256()
    given = [root / folder for folder in folders]
    for path in sorted(path for one in given for path in (one.rglob("*.py") if one.is_dir() else [one])):
        found.update(f"{path.relative_to(root).as_posix()}\0{len(path.read_bytes())}\0".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def due(stamps: Mapping[str, str], root: Path = ROOT) -> list[str]:
    """Give the groups whose guarded files are not those of their stamp."""
    return [name for name, (_, guarded) in GROUPS.items() if stamps.get(name) != digest(guarded, root)]


def run(names: Iterable[str]) -> int:
    """Run groups, and stamp those that pass; give pytest's exit status of the first that does not."""
    stamps = json.loads(STAMPS.read_text())
    for name in names:
        tests, guarded = GROUPS[name]
        status = subprocess.run(
            [sys.executable, "-m", "pytest", *tests, "-m", "exhaustive", "-n", "2", "--dist", "worksteal"], cwd=ROOT
        ).returncode
        if status:
            return status
        stamps[name] = digest(guarded)
        STAMPS.write_text(json.dumps(stamps, indent=2) + "\n")
    return 0


def main() -> int:
    """Read the command line."""
    command, every = sys.argv[1:2], sys.argv[2:] == ["all"]
    waiting = list(GROUPS) if every else due(json.loads(STAMPS.read_text()))
    if command == ["run"]:
        return run(waiting)
    print("\n".join(waiting))
    return 0 if command == ["due"] else 2


if __name__ == "__main__":
    sys.exit(main())
