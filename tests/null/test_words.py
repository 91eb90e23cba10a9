"""One meaning per word: a class's name is defined in one place."""

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "refold"
# The same thing for two frameworks, or for two operators.
TWINS = {"Generator", "Conversation", "Bad"}


def test_a_public_class_has_a_name_of_its_own():
    trees = [ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")]
    names = Counter(x.name for tree in trees for x in tree.body if isinstance(x, ast.ClassDef) and x.name[0] != "_")
    assert {name for name, count in names.items() if count > 1} == TWINS


def test_a_docstring_says_what_is_done():
    """Each begins with the verb of what is done; "Return what ..." is a riddle."""
    riddles = [
        f"{path.relative_to(ROOT)}: {x.name}"
        for folder in ("src", "tests", "tools", "examples")
        for path in (ROOT / folder).rglob("*.py")
        for x in ast.walk(ast.parse(path.read_text()))
        if isinstance(x, ast.FunctionDef) and (ast.get_docstring(x) or "").startswith(("Return what", "Yield what"))
    ]
    assert riddles == []
