"""Models spread over eight virtual devices equal one device; a process of its own, since devices are fixed at start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = [
    ("heads", "mamba"),
    ("heads", "mamba2"),
    ("heads", "granite"),
    ("time", "mamba"),
    ("time", "mamba2"),
    ("time", "granite"),
]


@pytest.mark.parametrize(("how", "model"), CASES)
def test_eight_devices_equal_one(how: str, model: str) -> None:
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    script = Path(__file__).with_name("parallel_check.py")
    done = subprocess.run([sys.executable, "-W", "error", script, how, model], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("equal")
