"""Private names of other packages are used in few places only, each of which goes on without them."""

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
    "ops/selective_scan/_gluon",
    "ops/ssd/_gluon",
    "models/torch/_gluon",
    "ops/triton/gluon",
    "ops/testing/frameworks.py",  # Triton's interpreter, for tests
    "judge/private.py",
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
