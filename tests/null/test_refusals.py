"""Every refusal has an id that is explained, and every explained id is used."""

import ast
import re

import pytest

from null.source import ROOT, files, tree
from refold.compiler.refusals import REASONS, Refusal

RAISED = ("NotALoop", "NotCaptured", "Refusal", "refused")


def used_ids() -> set[str]:
    """Return the ids of all refusals in the compiler's source."""
    found = set()
    for path in files("src/refold/compiler"):
        if path.name == "refusals.py":
            continue
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in RAISED:
                given = node.args[0]
                if not isinstance(given, ast.Constant):  # a row of a table, or a name that is set to an id before
                    assert isinstance(given, ast.Starred | ast.Name), f"{path}:{node.lineno}: write the id as it is"
                    continue
                found.add(given.value)
            elif isinstance(node, ast.Tuple) and len(node.elts) == 2:  # a row of a table
                found |= {part.value for part in node.elts[:1] if isinstance(part, ast.Constant)} & set(REASONS)
            elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "why":
                found |= {node.value.value} if isinstance(node.value, ast.Constant) else set()
    return found


def listed() -> dict[str, tuple[str, str]]:
    """Return the table of docs/compiler.md."""
    text = (ROOT / "docs/compiler.md").read_text()
    rows = re.findall(r"^\| `([a-z-]+)` \| (.+) \| (.+) \|$", text, re.MULTILINE)
    return {name: (found, remedy) for name, found, remedy in rows if name in REASONS or "-" in name}


def test_all_ids_are_explained_and_all_explained_ids_are_used():
    assert used_ids() == set(REASONS)


def test_a_program_shows_each_of_them():
    """Each id is one that a test of the compiler expects in a report."""
    sources = [path.read_text() for path in (ROOT / "tests/cpu/compiler").rglob("test_*.py")]
    seen = {name for name in REASONS for text in sources if f'"{name}"' in text or f"[{name}]: " in text}
    assert seen == set(REASONS)


def test_the_documentation_lists_them():
    assert listed() == REASONS


def test_a_refusal_says_what_and_what_to_do():
    refusal = Refusal("carry-squared", "h is multiplied by itself")
    assert str(refusal) == "h is multiplied by itself [carry-squared]"
    assert refusal.advice.startswith("h is multiplied by itself [carry-squared]: ")
    refusal = Refusal("carry-squared", "h is multiplied by itself", "a.py:3: h = h * h")
    assert refusal.told_of("a.py:9: y = h").startswith("a.py:9: y = h: h is multiplied by itself (a.py:3: h = h * h) [")
    assert refusal.told_of("a.py:3: h = h * h").startswith(
        "a.py:3: h = h * h: h is multiplied by itself [carry-squared]: "
    )
    assert refusal.advice.endswith(REASONS["carry-squared"][1])


def test_an_unknown_id_is_a_mistake():
    with pytest.raises(KeyError):
        Refusal("no-such-reason", "")
