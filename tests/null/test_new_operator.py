"""A made-up operator, in a folder of its own: everything that is discovered finds it, and no other file is touched."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = {
    "__init__": '''
from refold.ops.dispatch import call
from refold.ops.halving.spec import SPEC


def halving(x, y=None, *, times=1, backend=None):
    """Halve x some times, and add y.

    Example:
        >>> import numpy as np
        >>> from refold.ops.halving import halving
        >>> float(halving(np.ones((1, 2)))[0, 0])
        0.5
    """
    return call(SPEC, (x, y), (times,), backend)
''',
    "spec": """
from refold.ops.spec import Arg, Example, OpSpec, Option, Output, positive_int

SIZES = {"b": 2, "t": 5}
SPEC = OpSpec(
    name="halving",
    args=(Arg("x", ("b t",)), Arg("y", ("b t",), optional=True)),
    options=(Option("times", 1, "int", positive_int, "a positive integer"),),
    outputs=(Output("z", "b t", alone=("y",)),),
    cases=lambda: [
        Example("plain", SIZES),
        Example("strided", SIZES, strided=True),
        Example("twice", SIZES, options={"times": 2}),
        Example("all", SIZES, frozenset({"y"}), {"times": 2}),
    ],
    flops=lambda sizes: sizes["b"] * sizes["t"],
    complete="all",
)
""",
    "reference": """
from refold.ops.definition import wide


def halving(x, y, times):
    x, y = wide(x, y)
    half = x / 2**times
    return half if y is None else half + y
""",
    "_torch": """
def halving(*, x, y, times):
    half = x / 2**times
    return (half if y is None else half + y).to(x.dtype).contiguous()


def halving_backward(*, dz, x, y, times, needs):
    return {"x": dz / 2**times, "y": dz}
""",
    "bench": """
from refold.ops.timed import Timed


def cases(*, length=5):
    \"\"\"Time halving.\"\"\"
    yield Timed("halving", str(length), {})


SUITES = {"halves": cases}
""",
    "_jax": """
def halving(*, x, y, times):
    half = x / 2**times
    return (half if y is None else half + y).astype(x.dtype)
""",
}
CODE = """
import sys
import refold.ops
refold.ops.__path__.append(sys.argv[1])

import torch
from refold.ops.halving import halving
from refold.ops.spec import load, operators
from refold.ops.testing import CHECKS, check, problem

assert "halving" in operators()
assert refold.ops.explain("halving", torch.ones(2, 5)).chosen == "torch"
for case in load("halving").cases():
    for name in CHECKS:
        check(name, problem(load("halving"), case), "torch")

from refold.bench.suites import SUITES
assert SUITES["halves"].about() == "Time halving."
assert SUITES["halves"].options() == {"length": 5}

import refold.ops.library
arguments = (torch.ones(2, 5, requires_grad=True), None, 2, "")
assert set(torch.library.opcheck(torch.ops.refold.halving.default, arguments).values()) == {"SUCCESS"}
try:
    halving(torch.ones(2, 5), times=0)
except refold.errors.ArgumentError as error:
    assert "halving: times must be a positive integer; got 0" in str(error)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "halving").mkdir()
    for name, text in FILES.items():
        (tmp_path / "halving" / f"{name}.py").write_text(text)
    return tmp_path


def ran(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.mark.slow
def test_a_folder_is_an_operator(folder: Path) -> None:
    pytest.importorskip("torch")
    done = ran(CODE, folder)
    assert done.returncode == 0, done.stderr


def test_a_bug_in_it_is_found(folder: Path) -> None:
    pytest.importorskip("torch")
    wrong = FILES["_torch"].replace('"y": dz', '"y": 2 * dz')
    assert wrong != FILES["_torch"]
    (folder / "halving" / "_torch.py").write_text(wrong)
    done = ran(CODE, folder)
    assert "gradient" in done.stderr
