"""Run operators, the compiler's core and `accelerate` on the oldest and newest releases of what refold builds on.

    python tools/versions.py [NAME[:PART] ...]          makes an environment for each set of releases, runs its tests
    python tools/versions.py --again [NAME[:PART] ...]  runs only what did not pass in the last stored row of a part
    python tools/versions.py --render                   writes the table of docs/versions.md anew

An environment is made by pip in the folder build/versions/NAME, or in ``$REFOLD_VERSIONS/NAME``, and is used again. A
CUDA build of torch takes several GB and runs on the CPU. The outcome of each part goes to docs/versions.jsonl:
versions, date, tests. A part has an hour, or ``$REFOLD_VERSIONS_SECONDS``: what it did not reach then is not counted.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STORE, PAGE = ROOT / "docs" / "versions.jsonl", ROOT / "docs" / "versions.md"
SECONDS = float(os.environ.get("REFOLD_VERSIONS_SECONDS", "3600"))
FOLDER = Path(os.environ.get("REFOLD_VERSIONS", ROOT / "build" / "versions"))
CORE = [
    "tests/cpu/compiler/dynamo",
    "tests/cpu/compiler/test_spellings.py",
    "tests/cpu/compiler/test_public_recurrences.py",
]
PARTS = {
    "operators": [
        "tests/cpu/ops/test_contract.py",
        "tests/cpu/ops/test_torch_library.py",
        "tests/cpu/ops/test_ssd_plans.py",
        "tests/cpu/ops/test_gluon_interpreted.py",
    ],
    "compiler": CORE,
    "accelerate": ["tests/hf/test_layers.py", "tests/hf/test_accelerate.py"],
    "jax": ["tests/cpu/jax/test_transformations.py", "tests/cpu/jax/test_parallel.py"],
    "doctor": ["tests/null/test_versions.py", "tests/cpu/test_cli.py", "-k", "doctor or release or loss"],
}
TORCH = ["operators", "compiler", "accelerate", "doctor"]
# By name: Python, what pip installs (newest where no version is given), and the parts.
SETS = {
    "oldest": ("3.11", ["torch==2.11.*", "triton==3.6.*", "transformers==5.17.0"], TORCH),
    "torch-2.14": ("3.11", ["torch==2.14.*", "transformers==5.17.0"], TORCH),
    "newest-3.11": ("3.11", ["torch==2.15.*", "transformers==5.17.0"], TORCH),
    "newest": ("3.13", ["torch", "triton", "transformers"], TORCH),
    "python-3.12": ("3.12", ["torch", "triton", "transformers"], TORCH),
    "jax-oldest": ("3.11", ["jax==0.10.*", "safetensors"], ["jax"]),
    "jax-newest": ("3.13", ["jax", "safetensors"], ["jax"]),
}
SHOWN = ("torch", "triton", "transformers", "jax")
VERSIONS = """
import importlib.metadata as m, json, platform, sys
found = {"python": platform.python_version()}
for name in sys.argv[1:]:
    try: found[name] = m.version(name)
    except m.PackageNotFoundError: pass
print(json.dumps(found))
"""


def environment(name: str) -> Path:
    """Return the Python of a set's environment, which is made if it is not there."""
    python, wanted, _ = SETS[name]
    folder = FOLDER / name
    own = folder / "bin" / "python"
    if not (folder / ".done").exists():
        subprocess.run([f"python{python}", "-m", "venv", str(folder)], check=True)
        extras = "test,jax" if "jax" in name else "torch,numba,hf,test"
        subprocess.run([own, "-m", "pip", "install", "--quiet", *wanted], check=True)
        subprocess.run([own, "-m", "pip", "install", "--quiet", *wanted, "--editable", f"{ROOT}[{extras}]"], check=True)
        (folder / ".done").touch()
    return own


def run(name: str, python: Path, part: str, again: bool) -> dict[str, object]:
    """Run the tests of one part in an environment, or those that did not pass; return the row that is stored."""
    before = last(name, part) if again else {}
    # Of a name that was cut, all cases of the test.
    cut = [test if test.endswith("]") else test.partition("[")[0] for test in before.get("not_passed", [])]
    tests = list(dict.fromkeys(cut)) or PARTS[part]
    # GNU's timeout ends the tests, also those in processes of their own, and what they printed is kept.
    command = ["timeout", str(SECONDS), python, "-m", "pytest", "-vv", "--tb=line", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1) and (again or done.returncode != 124):  # nothing to add up
        raise SystemExit(
            f"{name}:{part}: pytest ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    outcomes = dict(re.findall(r"^(\S+::.+?) (PASSED|FAILED|SKIPPED|ERROR)\b", done.stdout, re.MULTILINE))
    words = [*outcomes.values()]
    counts = {word: words.count(word.upper()) for word in ("passed", "failed", "skipped", "error")}
    failed = sorted(test for test, outcome in outcomes.items() if outcome in ("FAILED", "ERROR"))
    if before.get("not_passed"):
        counts["passed"] = before["passed"] + before["failed"] + before["error"] - len(failed)
        counts["skipped"] = before["skipped"]
    versions = json.loads(subprocess.run([python, "-c", VERSIONS, *SHOWN], capture_output=True, check=True).stdout)
    revision = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "set": name, "part": part, "versions": versions, **counts, "rc": done.returncode, "not_passed": failed,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(), "revision": revision.stdout.strip(),
        **({"again": len(outcomes), "others": before["revision"]} if before.get("not_passed") else {}),
        **({"unfinished": SECONDS} if done.returncode == 124 else {}),
    }  # fmt: skip


def rows() -> list[dict[str, Any]]:
    """Return the last row of each set, versions and part."""
    read = map(json.loads, STORE.read_text().splitlines())
    return list({(row["set"], str(row["versions"]), row["part"]): row for row in read}.values())


def last(name: str, part: str) -> dict[str, Any]:
    """Return the last row of a set and a part; nothing if there is none."""
    return next((row for row in reversed(rows()) if (row["set"], row["part"]) == (name, part)), {})


def table() -> str:
    """Return the stored rows as a table in Markdown."""
    lines = ["| python | torch | triton | transformers | jax | part | passed | failed | date |", "|---" * 9 + "|"]
    for row in rows():
        versions = [row["versions"].get(name, "-") for name in ("python", *SHOWN)]
        more = f" (in {row['unfinished']:.0f} s)" if "unfinished" in row else ""
        counts = [f"{row['passed']}{more}", row["failed"] + row["error"]]
        lines.append(f"| {' | '.join(map(str, [*versions, row['part'], *counts, row['date']]))} |")
    return "\n".join(lines)


def rendered(page: str) -> str:
    """Return a page with the table of the stored rows."""
    return re.sub(
        r"(<!-- versions -->\n).*?(<!-- end -->)", lambda m: f"{m[1]}{table()}\n{m[2]}", page, flags=re.DOTALL
    )


def main(arguments: list[str]) -> int:
    """Run the named sets, or all; return 1 if a test failed."""
    wrong = False
    again = arguments[:1] == ["--again"]
    arguments = arguments[again:]
    for argument in [] if arguments == ["--render"] else arguments or list(SETS):
        name, _, one = argument.partition(":")
        python = environment(name)
        for part in [one] if one else SETS[name][2]:
            row = run(name, python, part, again)
            wrong |= row["rc"] != 0
            print(json.dumps(row), flush=True)
            with STORE.open("a") as file:
                file.write(json.dumps(row) + "\n")
    PAGE.write_text(rendered(PAGE.read_text()))
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
