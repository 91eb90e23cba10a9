"""Importing refold is light, and imports go one way only."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "refold"

# A part may import those above it in this list, and itself.
ORDER = [
    ["errors", "axes", "cache", "memory"],
    ["ops"],
    ["verify"],
    ["report"],
    ["compiler"],
    ["models"],
    ["generate"],
    ["compat"],
    ["integrations"],
    ["targets", "doctor", "audit"],
    ["propose"],
    ["bench"],
    ["cli"],
    ["__main__"],
]
RANK = {part: rank for rank, parts in enumerate(ORDER) for part in parts}


@pytest.mark.parametrize("name", ["torch", "jax", "triton", "transformers", "numpy"])
def test_importing_refold_imports_no_framework(name):
    code = f"import sys, refold; assert refold.__version__; sys.exit({name!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_name_says_what_there_is():
    import refold

    with pytest.raises(AttributeError, match="has no attribute 'accelarate'"):
        refold.accelarate  # noqa: B018


def _part(path, root):
    return path.relative_to(root).parts[0].removesuffix(".py")


def _imported_parts(path, root):
    package = ["refold", *path.relative_to(root).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = [*base, *(node.module or "").split(".")] if node.module else base
            names = [[*name, alias.name] for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        else:
            continue
        yield from (name[1] for name in names if name[0] == "refold" and len(name) > 1 and name[1] in RANK)


def _wrong_imports(root):
    return [
        f"{path.relative_to(root)} imports {part}"
        for path in sorted(root.rglob("*.py"))
        if _part(path, root) in RANK
        for part in _imported_parts(path, root)
        if RANK[part] > RANK[_part(path, root)]
    ]


def test_imports_go_the_way_the_design_says():
    assert _wrong_imports(ROOT) == []


def test_every_part_has_a_place_in_the_order():
    parts = {_part(path, ROOT) for path in ROOT.rglob("*.py")} - {"__init__"}
    assert parts <= RANK.keys()


@pytest.mark.parametrize(
    ("file", "source", "found"),
    [
        ("errors.py", "from .compiler import backend", "compiler"),
        ("errors.py", "import refold.compiler.backend", "compiler"),
        ("errors.py", "def f():\n    from . import cli", "cli"),
        ("ops/ssd/spec.py", "from ...verify import numerics", "verify"),
        ("models/configs.py", "from refold.generate.jax import Generator", "generate"),
    ],
)
def test_a_wrong_import_is_found(tmp_path, file, source, found):
    tree = tmp_path / "refold"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns("__pycache__"))
    with (tree / file).open("a") as planted:
        planted.write(f"\n{source}\n")
    assert set(_wrong_imports(tree)) == {f"{file} imports {found}"}
