"""Some cases of every operator through the Triton kernels, interpreted, on a machine without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

CASES = {
    "ssd": ("all_t9", "odd_chunk", "group_a_head", "packed_empty"),
    "selective_scan": ("all_t9", "packed_empty"),
    "linear_scan": ("all_t9", "packed_empty"),
    "causal_conv1d": ("all_t9", "packed_empty"),
    "gated_rmsnorm": ("",),
}


def test_contract_interpreted() -> None:
    """In a process of its own: Triton decides while it is imported whether kernels are interpreted."""
    names = ("test_contract.py", "test_extremes.py", "test_ssd_backward.py", "test_gluon_interpreted.py")
    files = [str(Path(__file__).with_name(name)) for name in names]
    chosen = [f"test_float32 and {op}-triton-{case}" for op, cases in CASES.items() for case in cases]
    chosen += [f"test_half_precision and ssd-triton-{case}" for case in ("plain_t1", "D_per_channel", "strided")]
    chosen += ["test_ssd_decays and triton", "test_ssd_nan and triton", "test_conv_nan and triton"]
    chosen += ["test_ssd_backward", "test_gluon_interpreted"]
    bad = ("ssd-triton-all_t9", "selective_scan-triton-plain_t1", "linear_scan-triton-packed_empty")
    chosen += [f"test_properties and {cell} and nonfinite" for cell in bad]
    command = [sys.executable, "-m", "pytest", *files, "-k", " or ".join(f"({c})" for c in chosen), "--tb=short"]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
