"""The files of the project as trees; each is parsed once for all tests that look at it."""

import ast
import functools
import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "tests", "tools", "examples")
tree = functools.cache(lambda path: ast.parse(path.read_text()))
"""Parse a file."""


@functools.cache
def files(*folders):
    """List the Python files below folders of the project, or below all of its folders."""
    return [path for folder in folders or FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def tool(name):
    """Load a program of the folder tools, which is no package."""
    spec = importlib.util.spec_from_file_location(f"tools_{name}", ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
