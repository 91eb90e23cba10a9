"""Type checkers know the names of refold, and the mistakes of a typed program are found."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import refold

MISTAKES = """
import torch
import refold

x = torch.ones(1, 8, 4)
refold.accelerate(1, 2, 3, 4, 5)
refold.compile(accept=3)
refold.ops.ssd(1)
refold.ops.no_such_operator
refold.nonsense
refold.explain()
refold.ops.linear_scan(x, [1.0])
refold.compile(lambda x: x, strickt=True)
refold.ops.linear_scan(x, x, initial_state=0.0)
refold.ops.kda(x, x, x, x, x, normalise=True)
refold.ops.gated_rmsnorm(x, None, x, eps=1e-5).no_such_method
"""
RIGHT = """
from typing import assert_type
import numpy as np
import torch
import refold

x, n = torch.ones(1, 8, 4), np.ones((1, 8, 4))
assert_type(refold.ops.linear_scan(x, torch.nn.Parameter(x), reset=x), tuple[torch.Tensor, torch.Tensor])
assert_type(refold.ops.ssd_step(x, x, x, x, x, x, D=None)[1], torch.Tensor)
assert_type(refold.ops.kda(x, x, x, x, x, normalize=True, initial_state=x)[0], torch.Tensor)
y, state = refold.ops.linear_scan(n, n)
y.mean()

@refold.compile
def layer(x: torch.Tensor, length: int) -> tuple[torch.Tensor, str]:
    return x, str(length)

class Layer(torch.nn.Module):
    @refold.compile(accept="always")
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

assert_type(layer(x, 3)[1], str)
layer.report.graphs[0].rewrites
refold.compile(Layer()).report.graphs
refold.compile(Layer(), strict=True)(x)
Layer().forward(x)
print(refold.__version__, refold.errors.ShapeError, refold.compile, refold.accelerate)
"""
# Nothing but what a user of these names sees is read.
SETTINGS = """
[mypy]
follow_imports = skip
ignore_missing_imports = true
[mypy-refold,refold.errors,refold.report,refold.report.*,refold.ops,refold.ops.*]
follow_imports = silent
[mypy-refold.compiler.engine,refold.integrations.transformers,torch,numpy,numpy.*]
follow_imports = silent
"""
# Instead of PyTorch, which takes a checker half a minute to read.
TORCH = """
from typing import Any, Callable
class Tensor:
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...
class Parameter(Tensor):
    def __init__(self, data: Tensor) -> None: ...
class nn:
    Parameter = Parameter
    class Module:
        __call__: Callable[..., Any]
def ones(*sizes: int) -> Tensor: ...
def __getattr__(name: str) -> Any: ...
"""


def test_mistakes_are_found_and_right_programs_pass(tmp_path):
    pytest.importorskip("mypy")
    files = {"mistakes.py": MISTAKES, "right.py": RIGHT, "mypy.ini": SETTINGS, "stubs/torch/__init__.pyi": TORCH}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "mypy", "mistakes.py", "right.py"]
    paths = os.environ | {"MYPYPATH": str(tmp_path / "stubs")}
    done = subprocess.run(command, cwd=tmp_path, env=paths, capture_output=True, text=True, check=False)
    found = {(line.split(":")[0], int(line.split(":")[1])) for line in done.stdout.splitlines() if ": error:" in line}
    assert found == {("mistakes.py", line) for line in range(6, 17)}, done.stdout + done.stderr


def test_checkers_read_the_names_that_there_are():
    tree = ast.parse(Path(refold.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    read = {alias.asname: getattr(node, "module", None) for node in block.body for alias in node.names}
    assert read.keys() == refold._EXPORTS.keys()
    for name, module in read.items():
        found = getattr(__import__(module, fromlist=[name]), name)
        assert found is getattr(refold, name), name
