"""docs/numerics.md shows the stored measurements, and these errors still hold."""

import json

import pytest

from null.source import tool
from refold.ops.spec import Example, load
from refold.ops.testing import measure, problem

numerics = tool("numerics")


def test_page_is_rendered_from_the_stored_measurements() -> None:
    assert numerics.PAGE.read_text() == numerics.render(), "run python tools/numerics.py render"


@pytest.mark.parametrize("op", ["linear_scan", "gated_rmsnorm"])
def test_stored_errors_are_reproduced(op: str) -> None:
    stored = json.loads((numerics.RESULTS / "torch-cpu.json").read_text())
    row = next(row for row in stored["rows"] if row["op"] == op and row["dtype"] == "bfloat16")
    small: Example = numerics.CASES[op]
    for found in measure(problem(load(op), small, "bfloat16"), "torch"):
        # Another processor sums in another order: the same error up to a factor of two.
        assert found.error <= 2 * row["errors"][found.name] + 1e-7
