"""docs/numerics.md shows the stored measurements, and these errors still hold."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from refold.ops.spec import Example, load
from refold.ops.testing import measure, problem

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("numerics", ROOT / "tools" / "numerics.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_is_rendered_from_the_stored_measurements(tool: ModuleType) -> None:
    assert tool.PAGE.read_text() == tool.render(), "run python tools/numerics.py render"


@pytest.mark.parametrize("op", ["linear_scan", "gated_rmsnorm"])
def test_stored_errors_are_reproduced(tool: ModuleType, op: str) -> None:
    stored = json.loads((tool.RESULTS / "torch-cpu.json").read_text())
    row = next(row for row in stored["rows"] if row["op"] == op and row["dtype"] == "bfloat16")
    small: Example = tool.CASES[op]
    for found in measure(problem(load(op), small, "bfloat16"), "torch"):
        # Another processor sums in another order: the same error up to a factor of two.
        assert found.error <= 2 * row["errors"][found.name] + 1e-7
