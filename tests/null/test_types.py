"""Type checkers know the names of refold, and the mistakes of a typed program are found."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import refold

PROGRAM = """
import refold

refold.accelerate(1, 2, 3, 4, 5)
refold.compile(accept=3)
refold.ops.ssd(1)
refold.ops.no_such_operator
refold.nonsense
refold.explain()
reveal_type(refold.compile)
"""
RIGHT = """
import numpy as np
import refold

y, state = refold.ops.linear_scan(np.ones((1, 8, 4)), np.ones((1, 8, 4)))
print(refold.__version__, refold.errors.ShapeError, refold.compile, refold.accelerate)
"""


def checked(folder, program):
    path = folder / "program.py"
    path.write_text(program)
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", "--ignore-missing-imports", str(path)]
    command += ["--cache-dir", str(Path(__file__).parents[2] / ".mypy_cache")]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout.splitlines()


def test_mistakes_are_found_and_right_programs_pass(tmp_path):
    pytest.importorskip("mypy")
    found = checked(tmp_path, PROGRAM)
    wrong = {int(line.split(":")[1]) for line in found if ": error:" in line}
    assert wrong == set(range(4, 10)), found
    assert not [line for line in found if "Revealed type" in line and 'is "Any"' in line]
    assert checked(tmp_path, RIGHT) == ["Success: no issues found in 1 source file"]


def test_checkers_read_the_names_that_there_are():
    tree = ast.parse(Path(refold.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    read = {alias.asname: getattr(node, "module", None) for node in block.body for alias in node.names}
    assert read.keys() == refold._EXPORTS.keys()
    for name, module in read.items():
        found = getattr(__import__(module, fromlist=[name]), name)
        assert found is getattr(refold, name), name
