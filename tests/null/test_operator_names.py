"""An operator is a folder: no other file of the package or of the tools decides by its name."""

import ast

import pytest

from null.source import ROOT, files, tree
from refold.ops.spec import all_specs, operators

OWN = (
    *(f"src/refold/ops/{name}/" for name in operators()),
    *(f"src/refold/{room}/" for room in ("integrations", "compat", "engines")),
)
"""Folders of operators, and those that translate from other packages."""
REASONS = {
    "src/refold/ops/__init__.py": "public functions are listed, for type checkers and editors",
    "src/refold/bench/plots.py": "a figure names the stored rows that it shows",
    "tools/render_tables.py": "a table names the stored rows that it shows",
}
"""Files that name operators, and why."""


def names_of(program: ast.AST) -> set[str]:
    """Find the operators that a file names in a string, or by comparing with one of their functions."""
    specs = {spec.name for spec in all_specs()}
    functions = specs | {f"{name}_" for name in specs} | {f"{name}_backward" for name in specs}
    found = set()
    for node in ast.walk(program):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value} & functions
        elif isinstance(node, ast.Compare):
            sides = (node.left, *node.comparators)
            found |= {side.attr for side in sides if isinstance(side, ast.Attribute)} & functions
    return found


def outside(*folders: str) -> dict[str, set[str]]:
    """Find the files outside operators' folders that name operators, and which."""
    named = {path.relative_to(ROOT).as_posix(): names_of(tree(path)) for path in files(*folders)}
    return {file: found for file, found in named.items() if found and not file.startswith(OWN)}


def test_operators_are_named_in_their_folders() -> None:
    found = outside("src", "tools")
    assert len(REASONS) <= 3
    assert found.keys() - REASONS.keys() == set(), "say what is asked of the operator as a trait of its spec"
    assert REASONS.keys() - found.keys() == set(), "take these off the list"


@pytest.mark.parametrize(
    "source",
    ["if name == 'ssd': pass", "TABLE = {'linear_scan': 1}", "f'{x}' in ('ssd_step', '')", "target is ops.ssd_step_"],
)
def test_names_are_found(source: str) -> None:
    assert names_of(ast.parse(source))


def test_calls_and_prose_name_operators() -> None:
    assert not names_of(ast.parse('"""Compute `ssd`."""\ny = ops.ssd(x)  # as "ssd" does'))
