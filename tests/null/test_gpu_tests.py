"""Tests that need a GPU are collected without one: they use what other tests say, which may have changed."""

import subprocess
import sys

from null.source import ROOT

COLLECT = """
import sys, pytest, torch
torch.cuda.is_available = lambda: True
sys.exit(pytest.main(["tests/gpu", "--collect-only", "-q", "-n", "0", "-W", "ignore", "-p", "no:cacheprovider"]))
"""


def test_tests_on_a_gpu_are_collected():
    ran = subprocess.run([sys.executable, "-c", COLLECT], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]
