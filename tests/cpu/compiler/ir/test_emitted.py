"""What rewrites insert into a graph of Inductor's has code there; what Inductor only decomposes comes too late."""

import ast
from pathlib import Path

import pytest
import torch
from torch._inductor.decomposition import decompositions
from torch._inductor.lowering import lowerings

import refold

aten = torch.ops.aten
COMPILER = Path(refold.__file__).parent / "compiler"
# A captured loop is replaced before Inductor decomposes its graph.
FILES = [file for file in sorted(COMPILER.rglob("*.py")) if file.parent != COMPILER / "dynamo"]


def without_code(source):
    """List the operations that a file inserts, and for which Inductor has no code but a decomposition."""
    calls = [x for x in ast.walk(ast.parse(source)) if isinstance(x, ast.Call) and x.args]
    named = [x for x in calls if getattr(x.func, "attr", getattr(x.func, "id", "")) in ("call", "call_function")]
    found = {ast.unparse(x) for call in named for x in ast.walk(call.args[0]) if ast.unparse(x).startswith("aten.")}
    operations = [eval(name, {"aten": aten}) for name in sorted(found) if name.count(".") == 2]
    return [str(x) for x in operations if x not in lowerings and x in decompositions]


def test_what_is_not_compiled_is_found():
    source = "emit.call(aten.stack.default, [x])\ncall(aten.exp.default if y else aten.full_like.default, x)"
    assert without_code(source) == ["aten.full_like.default", "aten.stack.default"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(COMPILER)))
def test_inductor_has_code(file):
    assert not without_code(file.read_text())
