"""Importing refold is light, and imports go one way only."""

import ast
import functools
import graphlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "refold"

# A part may import those above it in this list, and itself.
ORDER = [
    ["errors", "axes", "cache", "memory", "early"],
    ["versions"],
    ["ops"],
    ["verify"],
    ["judge"],
    ["pytest_plugin"],
    ["report"],
    ["compiler"],
    ["models"],
    ["generate"],
    ["compat"],
    ["parallel"],
    ["integrations", "engines"],
    ["targets", "doctor", "audit", "warm"],
    ["propose"],
    ["bench"],
    ["cli"],
    ["__main__"],
]

# So it is within the compiler; folders and files of one line import nothing of one another.
COMPILER = [
    ["environment", "private", "refusals", "patience"],
    ["ir"],
    ["compile_time", "complex_values", "decisions", "external_cumsum"],
    ["inductor"],
    ["recurrence", "notation"],
    ["passes"],
    ["pipeline"],
    ["choices", "dynamo"],
    ["options"],
    ["validate"],
    ["record"],
    ["early_rewrites"],
    ["session"],
    ["replay", "regions"],
    ["engine", "without"],
    ["backend"],
]


@pytest.mark.parametrize("name", ["torch", "jax", "triton", "transformers", "numpy"])
def test_importing_refold_imports_no_framework(name):
    code = f"import sys, refold; assert refold.__version__; sys.exit({name!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_name_says_what_there_is():
    import refold

    with pytest.raises(AttributeError, match="has no attribute 'accelarate'"):
        refold.accelarate  # noqa: B018


@functools.cache
def _statements(source):
    """Return the imports of a source text: how far each goes up, from what, the names. Copied trees share them."""
    found, tree = [], ast.parse(source)
    for node in tree.body:  # what type checkers alone read runs nowhere
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found.append((node.level, node.module or "", [alias.name for alias in node.names]))
        elif isinstance(node, ast.Import):
            found += [(0, "", [alias.name]) for alias in node.names]
    return found


def _imports(path, root):
    """Yield the names that a file imports of the package, as paths of names: ("compiler", "ir", "fx", "value")."""
    package = ["refold", *path.relative_to(root).parts[:-1]]
    for level, module, names in _statements(path.read_text()):
        base = [*(package[: len(package) - level + 1] if level else []), *filter(None, module.split("."))]
        whole = [(*base, *name.split(".")) for name in names]
        yield from (name[1:] for name in whole if name[0] == "refold")


def _wrong(root, order, *folder, peers=False):
    """Return the imports that go against an order of what is in a folder."""
    rank = {part: rank for rank, parts in enumerate(order) for part in parts}
    found = set()
    for path in sorted(root.joinpath(*folder).rglob("*.py")):
        own = path.relative_to(root.joinpath(*folder)).parts[0].removesuffix(".py")
        for name in _imports(path, root):
            part = name[len(folder)] if name[: len(folder)] == folder and len(name) > len(folder) else None
            if own in rank and part in rank and part != own and rank[part] + peers > rank[own]:
                found.add(f"{path.relative_to(root)} imports {part}")
    return found


def _wrong_imports(root):
    passes = [[path.stem for path in (root / "compiler" / "passes").glob("*.py")]]
    return (
        _wrong(root, ORDER)
        | _wrong(root, COMPILER, "compiler", peers=True)
        | _wrong(root, passes, "compiler", "passes", peers=True)
    )


def test_imports_go_the_way_the_design_says():
    assert _wrong_imports(ROOT) == set()


def _file(name, root):
    """Return the file that a path of names is in."""
    while name and not (root.joinpath(*name) / "__init__.py").exists():
        if (path := root.joinpath(*name).with_suffix(".py")).exists():
            return path
        name = name[:-1]
    return root.joinpath(*name) / "__init__.py"


def test_no_files_import_one_another_in_a_circle():
    graph = {path: {_file(name, ROOT) for name in _imports(path, ROOT)} - {path} for path in ROOT.rglob("*.py")}
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises a CycleError that names the files


@pytest.mark.parametrize(("folder", "order"), [((), ORDER), (("compiler",), COMPILER)])
def test_every_part_has_a_place_in_the_order(folder, order):
    here = ROOT.joinpath(*folder)
    parts = {path.relative_to(here).parts[0].removesuffix(".py") for path in here.rglob("*.py")} - {"__init__"}
    assert parts == {part for parts in order for part in parts}


@pytest.mark.parametrize(
    ("file", "source", "found"),
    [
        ("errors.py", "from .compiler import backend", "compiler"),
        ("errors.py", "import refold.compiler.backend", "compiler"),
        ("errors.py", "def f():\n    from . import cli", "cli"),
        ("ops/ssd/spec.py", "from ...verify import numerics", "verify"),
        ("models/configs.py", "from refold.generate.jax import Generator", "generate"),
        ("compiler/ir/fx.py", "from ..recurrence.affine import Loop", "recurrence"),
        ("compiler/passes/multiply_out.py", "from .merge_products import merge_products", "merge_products"),
        ("compiler/notation/read.py", "from .. import session", "session"),
        ("compiler/recurrence/slices.py", "from ..notation.read import read", "notation"),
    ],
)
def test_a_wrong_import_is_found(tmp_path, file, source, found):
    tree = tmp_path / "refold"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns("__pycache__"))
    with (tree / file).open("a") as planted:
        planted.write(f"\n{source}\n")
    assert _wrong_imports(tree) == {f"{file} imports {found}"}
