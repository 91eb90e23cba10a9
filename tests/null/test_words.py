"""One meaning per word: a class's name is defined in one place."""

import ast
from collections import Counter

from null.source import ROOT, files, tree

# The same thing for two frameworks, or for two operators.
TWINS = {"Generator", "Conversation", "Bad"}


def test_a_public_class_has_a_name_of_its_own():
    names = Counter(
        x.name for path in files("src") for x in tree(path).body if isinstance(x, ast.ClassDef) and x.name[0] != "_"
    )
    assert {name for name, count in names.items() if count > 1} == TWINS


def test_a_docstring_says_what_is_done():
    """Each begins with the verb of what is done; "Return what ..." is a riddle."""
    riddles = [
        f"{path.relative_to(ROOT)}: {x.name}"
        for path in files()
        for x in ast.walk(tree(path))
        if isinstance(x, ast.FunctionDef) and (ast.get_docstring(x) or "").startswith(("Return what", "Yield what"))
    ]
    assert riddles == []
