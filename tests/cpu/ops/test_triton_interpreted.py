"""Some cases of every operator through the Triton kernels, interpreted, on a machine without a GPU."""

from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("triton")

from refold.ops.backends import absence
from refold.ops.spec import load, operators
from support.interpreted import ONCE_OR_ALL, passed

CASES = {
    "ssd": ("all_t9", "odd_chunk", "group_a_head", "packed_empty"),
    "selective_scan": ("all_t16", "packed_empty"),
    "linear_scan": ("t17", "packed_empty"),
    "causal_conv1d": ("all_t5", "packed_empty"),
    "delta_rule": ("all_t9", "per_key_t9", "bounded", "linear_per_key", "packed_empty"),
}
"""Of an operator that is not here, all cases run."""
HALF = {"ssd": ("plain_t1", "all_t15"), "delta_rule": ("all_t25", "per_key_t9", "linear")}
"""Cases in 16 bits."""
BAD = {"ssd": "all_t15", "selective_scan": "plain_t1", "linear_scan": "packed_empty", "delta_rule": "per_key_t9"}
"""Cases with values that are not finite."""
KERNELS = "ssd_backward", "ssd_hopper", "slots", "gluon_interpreted", "interpreter", "delta_hopper", "delta_backward"


@pytest.mark.slow
@ONCE_OR_ALL
def test_contract_interpreted(rows: str) -> None:
    """All cases of the tables; where only some tests run, the last of each operator."""
    every = rows == "exhaustive"
    files = [str(Path(__file__).with_name(f"test_{name}.py")) for name in ("contract", "extremes")]
    cells = [
        ("test_float32", op, case)
        for op in operators()
        if absence(load(op), "triton") is None
        for case in CASES.get(op, tuple(map(str, load(op).cases())))[0 if every else -1 :]
    ]
    cells += [
        ("test_half_precision", op, f"{case}-{dtype}")
        for op in HALF
        for case, dtype in product(HALF[op][0 if every else -1 :], ("bf", "f")[: 2 if every else 1])
    ]
    cells += [
        ("test_properties_of_slow_backends", op, f"{case}-nonfinite{rest}")
        for op, case in BAD.items()
        for rest in ("", "_gradients")[: 2 if every else 1]
    ]
    chosen = [f"{test} and {op}-triton-{case}" for test, op, case in cells]
    chosen += ["test_ssd_decays and triton", "test_ssd_nan and triton", "test_conv_nan and triton"]
    without = "" if every else " and not nonfinite_gradients"
    printed = passed("-vv", *files, "-k", " or ".join(f"({c}{without})" for c in chosen), "-m", "" if every else rows)
    missing = [cell for cell in cells if f"{cell[0]}[{cell[1]}-triton-{cell[2]}" not in printed]
    assert not missing, f"no tests have the names {missing}"


@pytest.mark.slow
@ONCE_OR_ALL
def test_kernels_interpreted(rows: str) -> None:
    """The files about kernels of one operator."""
    passed(
        *(str(Path(__file__).with_name(f"test_{name}.py")) for name in KERNELS),
        "-m",
        "" if rows == "exhaustive" else rows,
    )


@pytest.mark.slow
@ONCE_OR_ALL
def test_ranks_and_sweeps_interpreted(rows: str) -> None:
    """What kernels add where ranks share a sequence; the sweeps of coupled carries and of running maxima."""
    files = [Path(__file__).with_name("test_ranks.py"), Path(__file__).parent.parent / "compiler" / "test_systems.py"]
    assert "skipped" not in passed(*map(str, files), "-k", "what_enters or gpu", "-m", rows)
