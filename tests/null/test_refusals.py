"""Every refusal of a loop has an id that is explained, and every explained id is used."""

import ast
import re
from pathlib import Path

import pytest

from refold.compiler.refusals import REASONS, Refusal

ROOT = Path(__file__).parents[2]


def used_ids() -> set[str]:
    """Return the first arguments of all refusals in the compiler's source."""
    found = set()
    for path in (ROOT / "src/refold/compiler").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("NotALoop", "Refused", "Refusal"):
                given = node.args[0]
                assert isinstance(given, ast.Constant | ast.Starred), f"{path}:{node.lineno}: write the id as it is"
                if isinstance(given, ast.Constant):
                    found.add(given.value)
            if isinstance(node, ast.Tuple) and len(node.elts) == 2:  # tables of (id, message)
                parts = [part.value for part in node.elts if isinstance(part, ast.Constant)]
                if len(parts) == 2 and parts[0] in REASONS and path.name != "refusals.py":
                    found.add(parts[0])
    return found


def listed() -> dict[str, tuple[str, str]]:
    """Return the table of docs/compiler.md."""
    text = (ROOT / "docs/compiler.md").read_text()
    rows = re.findall(r"^\| `([a-z-]+)` \| (.+) \| (.+) \|$", text, re.MULTILINE)
    return {name: (found, remedy) for name, found, remedy in rows if name in REASONS or "-" in name}


def test_all_ids_are_explained_and_all_explained_ids_are_used():
    assert used_ids() == set(REASONS)


def test_the_documentation_lists_them():
    assert listed() == REASONS


def test_a_refusal_says_what_and_what_to_do():
    refusal = Refusal("carry-squared", "h is multiplied by itself")
    assert str(refusal) == "h is multiplied by itself [carry-squared]"
    assert refusal.advice.startswith("h is multiplied by itself [carry-squared]: ")
    assert refusal.advice.endswith(REASONS["carry-squared"][1])


def test_an_unknown_id_is_a_mistake():
    with pytest.raises(KeyError):
        Refusal("no-such-reason", "")
