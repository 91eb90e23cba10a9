"""Try every hostile and every honest candidate, and print how many attacks succeed and how many honest ones pass.

python tools/attacks.py                 # all of tests/adversarial and tests/benign
python tools/attacks.py caching state   # those in folders of these names

Candidates stand in files ``candidates.py``, with the decorator `candidate`: a function takes the place of the
``forward`` of its original, a class is a module, or a function of autograd that a module applies. One that does more
than that has a file with a ``ModelNew``, and says what is expected by names in capitals: ``EXPECT``, ``ORIGINAL``,
``OFF`` and ``TERMS``. ``Model`` is that of the original, and stands in the same source.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from refold.judge import Nursery, Terms, Verdict, decide
from refold.judge.program import source

# Checks that level quick does not make, or makes only as far as its time allows; others are tried at that level.
DEEP = {"C6", "N4", "N5", "N6", "N7", "U3"}
# What refuses most programs that are wrong in a branch. Where another check is expected, it is shown without these.
BRANCHES = frozenset({"C7", "C8"})
ROOT = Path(__file__).parent.parent / "tests"
ORIGINALS = ROOT / "adversarial" / "originals"
IMPORT = re.compile(r"^from originals\.(\w+) import Model$", re.MULTILINE)


@dataclass(frozen=True)
class Entry:
    """One candidate: its folder and its name, its source, and what is expected of it."""

    name: str
    text: str
    expect: frozenset[str]
    original: str
    off: frozenset[str]
    terms: dict[str, Any]

    @property
    def folder(self) -> str:
        """The folder of its file."""
        return self.name.partition("/")[0]

    def trial(self, nursery: Nursery, off: frozenset[str] = frozenset(), seed: int | None = None) -> Verdict:
        """Try the candidate, leaving out speed unless it is about speed."""
        level = "full" if self.expect & DEEP or "accepted" in self.expect else "quick"
        off |= BRANCHES - self.expect if (BRANCHES | {"accepted"}).isdisjoint(self.expect) else frozenset()
        terms = Terms(**({"accept": "right", "timeout": 20.0, "rival": "eager", "level": level} | self.terms))
        first = source(originals()[self.original], name=f"{self.original}.py", role="original")
        second = source(IMPORT.sub(lambda _: first.text, self.text), name=f"{Path(self.name).name}.py")
        return decide(nursery, first, second, None, terms, off=off, seed=seed)


def candidate(*expect: str, original: str = "layer", off: Iterable[str] | None = None, **terms: Any) -> dict[str, Any]:
    """Say what is expected of a candidate.

    Args:
        expect: The check that refuses it, or those that may, if it depends on the moment; nothing if it is accepted.
        original: One of `originals`.
        off: The checks without which it passes, each of them needed; those of ``expect`` unless said, empty if so many
            refuse it that it shows nothing about one.
        terms: Options of the trial, which is at level quick if the check is made there.
    """
    expected = frozenset(expect or ("accepted",))
    return {
        "expect": expected,
        "original": original,
        "off": expected if off is None else frozenset(off),
        "terms": terms,
    }


def original(draw: Callable[[], list[Any]]) -> Callable[[Any], Any]:
    """Say what inputs an original draws, of which only the ``forward`` is written."""
    return lambda forward: (forward, draw)


@cache
def originals() -> dict[str, str]:
    """Return the source of each original by its name."""
    found = {path.stem: path.read_text() for path in ORIGINALS.glob("*.py")}
    for node, call, own, imports in _decorated(found.pop("forwards")):
        assert isinstance(call.args[0], ast.Lambda)
        model = "class Model(torch.nn.Module):\n" + textwrap.indent(own, "    ")
        found[node.name] = f"{imports}\n\n\n{model}\n\ndef get_inputs():\n    return {ast.unparse(call.args[0].body)}\n"
    return found


def entries(folder: Path) -> list[Entry]:
    """Read what is expected of the candidates in a folder, without running them."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        if path.parent == ORIGINALS or path.name.startswith("test_"):
            continue
        text = path.read_text()
        found += _several(path, text) if path.name == "candidates.py" else [_file(path, text)]
    return sorted(found, key=lambda entry: entry.name)


def _several(path: Path, text: str) -> Iterator[Entry]:
    """Make a ``ModelNew`` of each function and class of a file; it has those imports that it reads."""
    for node, call, own, imports in _decorated(text):
        named = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
        facts = candidate(*map(ast.literal_eval, call.args), **named)
        if isinstance(node, ast.FunctionDef):
            own = "class ModelNew(Model):\n" + textwrap.indent(own, "    ")
        elif ast.unparse(node.bases[0]) == "torch.autograd.Function":
            call_it = f"    def forward(self, x):\n        return {node.name}.apply(x)\n"
            own += f"\n\nclass ModelNew(torch.nn.Module):\n{call_it}"
        else:
            own = re.sub(rf"(?<![\w.]){node.name}\b", "ModelNew", own)
        head = f"{imports}\nfrom originals.{facts['original']} import Model\n\n\n"
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", node.name).lower()
        yield Entry(f"{path.parent.name}/{name}", head + own, **facts)


def _decorated(text: str) -> Iterator[tuple[ast.FunctionDef | ast.ClassDef, ast.Call, str, str]]:
    """Yield the candidates of a file: decorator, source as a ``forward`` or class, and the imports that it reads."""
    lines, tree = text.splitlines(keepends=True), ast.parse(text).body
    imports = [node for node in tree if isinstance(node, (ast.Import, ast.ImportFrom))]
    for node in tree:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            call = node.decorator_list[0]
            assert isinstance(call, ast.Call)
            own = "".join(lines[call.end_lineno : node.end_lineno])
            if isinstance(node, ast.FunctionDef):
                own = own.replace(f"def {node.name}(", "def forward(", 1)
            read = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} - {
                "Model",
                "candidate",
                "original",
            }
            needed = [each for each in imports if read & {alias.name.split(".")[0] for alias in each.names}]
            yield node, call, own, "\n".join(map(ast.unparse, needed))


def _file(path: Path, text: str) -> Entry:
    """Read what a file says by names in capitals."""
    said = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id in ("EXPECT", "ORIGINAL", "TERMS", "OFF")
    }  # fmt: skip
    expect, imported = said.get("EXPECT", "accepted"), IMPORT.search(text)
    original = imported[1] if imported else said.get("ORIGINAL", "layer")
    expected = {expect} if isinstance(expect, str) else expect
    facts = candidate(*expected, original=original, off=said.get("OFF"), **said.get("TERMS", {}))
    return Entry(f"{path.parent.name}/{path.stem}", text, **facts)


def main(chosen: list[str]) -> int:
    """Try them all; return how many did other than expected."""
    wrong = 0
    with Nursery(threads=1) as nursery:
        for folder, title in (("adversarial", "attack success rate"), ("benign", "benign pass rate")):
            accepted = tried = 0
            for entry in entries(ROOT / folder):
                if chosen and not {entry.folder, entry.name} & set(chosen):
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
