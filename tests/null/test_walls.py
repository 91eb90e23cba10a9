"""Private names of other packages are used in few places only, each of which goes on without them."""

import ast

import pytest

from support.private_names import ROOT, defined, on_objects, used

# What each door does without a name is tested in tests/cpu/compiler/dynamo/test_private_names.py, test_launch.py,
# test_gluon_interpreted.py and tests/cpu/judge/test_private_names.py; docs/design.md has the table.
DOORS = (
    "compiler/dynamo/",  # Dynamo's interpreter and variables
    "compiler/private.py",
    "compiler/without.py",
    "ops/torch/private.py",
    "ops/torch/launch.py",
    "ops/torch/tma_launch.py",
    "ops/torch/compiles.py",
    "ops/torch/triton_start.py",
    "ops/selective_scan/_gluon",
    "ops/ssd/_gluon",
    "ops/delta_rule/_gluon",
    "models/torch/_gluon",
    "ops/triton/gluon",
    "ops/testing/frameworks.py",  # Triton's interpreter, for tests
    "judge/private.py",
    "engines/vllm.py",  # its table of backends, and the method that a custom op runs
    "bench/",  # PyTorch's own associative_scan, which is measured
)


def outside(root):
    """Return the files that use private names and are no door."""
    paths = list(root.rglob("*.py"))
    # The last is of the package accelerate; it is written only where it is there.
    own = {*defined(paths), "_refold_original", "_refold_arguments", "_old_forward"}
    names = {str(path.relative_to(root)): used(path) | on_objects(path, own) for path in paths}
    return {file: found for file, found in names.items() if found and not file.startswith(DOORS)}


def test_private_names_are_used_at_doors_only():
    assert outside(ROOT) == {}


@pytest.mark.parametrize(
    "source",
    [
        "from torch._inductor import config",
        "import torch\ntorch._dynamo.reset()",
        "from torch.fx.experimental.symbolic_shapes import ShapeEnv",
        "def f():\n    import triton.runtime.jit",
        "def f(op):\n    return op._schema",
        "def f(x):\n    x._version = 1",
    ],
)
def test_a_private_name_elsewhere_is_found(tmp_path, source):
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "planted.py").write_text(source)
    assert list(outside(tmp_path)) == ["ops/planted.py"]


def private_imports(root):
    """Find private names that a file imports from another one, and private files that another folder imports."""
    found = set()
    for path in root.rglob("*.py"):
        folder = path.parent.relative_to(root.parent).parts
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom):
                continue
            parts = (*folder[: len(folder) - node.level + 1] * bool(node.level), *(node.module or "").split("."))
            parts = tuple(filter(None, parts))
            private = [part for part in parts if part.startswith("_") and part != "__future__"]
            names = [name for name in (alias.name for alias in node.names) if name[0] == "_" != name[1:2]]
            files = [name for name in names if (root.parent.joinpath(*parts) / f"{name}.py").exists()]
            if parts[:1] == (root.name,) and (
                set(names) - set(files) or ((private or files) and parts[: len(folder)] != folder)
            ):
                found.add((path.relative_to(root).as_posix(), ".".join(parts), *names))
    return found


def test_what_files_share_has_public_names():
    assert private_imports(ROOT) == set()


@pytest.mark.parametrize(
    "line",
    [
        "from refold.ops.b.c import _hidden",
        "from ..b.c import _hidden",
        "from ..b import _c",
        "from ..b._c import shown",
    ],
)
def test_private_imports_are_found(line, tmp_path):
    for name in ("ops/a/user", "ops/b/c", "ops/b/_c"):
        (tmp_path / "refold" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "refold" / f"{name}.py").write_text("")
    (tmp_path / "refold/ops/a/user.py").write_text(line)
    assert private_imports(tmp_path / "refold")
    (tmp_path / "refold/ops/a/user.py").write_text("from . import _own\nfrom ..b.c import d\nfrom torch import _c")
    (tmp_path / "refold/ops/a/_own.py").write_text("")
    assert not private_imports(tmp_path / "refold")


@pytest.mark.parametrize("room", ["integrations", "compat"])
def test_dynamo_can_trace_layers_under_a_mode(room):
    """Under a default device, Dynamo refuses `Tensor.unflatten`, which calls `super`, but not `torch.unflatten`."""
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    calls = [x for file in files for x in ast.walk(ast.parse(file.read_text())) if isinstance(x, ast.Call)]
    named = [ast.unparse(x.func) for x in calls if getattr(x.func, "attr", "") == "unflatten"]
    assert {*named} == {"torch.unflatten"}
