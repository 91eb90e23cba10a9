"""Try every hostile and every honest candidate, and print how many attacks succeed and how many honest ones pass.

python tools/attacks.py                 # all of tests/adversarial and tests/benign
python tools/attacks.py caching state   # those in folders of these names

A candidate is a file that says what is expected of it: ``EXPECT`` (the check that refuses it, or those that may,
if it depends on the moment; ``accepted`` unless said), ``ORIGINAL`` (a file in tests/adversarial/originals, ``layer``
unless said), ``TERMS`` (options of the trial, which is at level quick if the check is made there) and ``OFF`` (the
checks without which it passes, each of them needed; those of ``EXPECT`` unless said, empty if so many refuse it that it
shows nothing about one).
"""

from __future__ import annotations

import ast
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from refold.judge import Judge, Nursery, Terms, Verdict, program

# Checks that level quick does not make, or makes only as far as its time allows; others are tried at that level.
DEEP = {"C6", "N4", "N5", "N6", "N7", "U3", "P6"}
ROOT = Path(__file__).parent.parent / "tests"
ORIGINALS = ROOT / "adversarial" / "originals"


@dataclass(frozen=True)
class Entry:
    """One candidate and what is expected of it."""

    path: Path
    expect: frozenset[str]
    original: str = "layer"
    off: frozenset[str] = frozenset()
    terms: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The folder and the name of the file."""
        return f"{self.path.parent.name}/{self.path.stem}"

    def trial(self, nursery: Nursery, off: frozenset[str] = frozenset(), seed: int | None = None) -> Verdict:
        """Try the candidate, leaving out speed unless it is about speed."""
        level = "full" if self.expect & DEEP or "accepted" in self.expect else "quick"
        terms = Terms(**({"accept": "right", "timeout": 20.0, "rival": "eager", "level": level} | self.terms))
        first = program(ORIGINALS / f"{self.original}.py", role="original")
        return Judge(nursery).decide(first, program(self.path, role="candidate"), None, terms, off=off, seed=seed)


def entries(folder: Path) -> list[Entry]:
    """Read what is expected of the candidates in a folder, without running them."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        if path.parent == ORIGINALS or path.name.startswith("test_"):
            continue
        said = {
            node.targets[0].id: ast.literal_eval(node.value)
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.isupper()
            and node.targets[0].id in ("EXPECT", "ORIGINAL", "TERMS", "OFF")
        }  # fmt: skip
        expect = said.get("EXPECT", "accepted")
        expect = frozenset({expect} if isinstance(expect, str) else expect)
        off = frozenset(said.get("OFF", expect))
        found.append(Entry(path, expect, said.get("ORIGINAL", "layer"), off, said.get("TERMS", {})))
    return found


def main(chosen: list[str]) -> int:
    """Try them all; return how many did other than expected."""
    wrong = 0
    with Nursery(threads=1) as nursery:
        for folder, title in (("adversarial", "attack success rate"), ("benign", "benign pass rate")):
            accepted = tried = 0
            for entry in entries(ROOT / folder):
                if chosen and not {entry.path.parent.name, entry.name} & set(chosen):
                    continue
                start = time.perf_counter()
                verdict = entry.trial(nursery)
                tried += 1
                accepted += verdict.accepted
                decided = verdict.check or verdict.outcome
                as_expected = decided in entry.expect
                wrong += not as_expected
                seconds = time.perf_counter() - start
                mark = "  " if as_expected else "! "
                print(f"{mark}{entry.name:32} {decided:9} {seconds:5.2f} s  {verdict.reason[:150]}", flush=True)
            if tried:
                print(f"{title}: {accepted} of {tried} ({accepted / tried:.0%})", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
