"""Tests in a process of its own, where Triton interprets kernels: it decides while it is imported."""

import os
import subprocess
import sys

import pytest

ONCE_OR_ALL = pytest.mark.parametrize(
    "rows", ["not exhaustive", pytest.param("exhaustive", marks=pytest.mark.exhaustive)]
)
"""Of a test that runs others: those that are not exhaustive, and in the exhaustive tests the rest."""


def passed(*options: str) -> str:
    """Run pytest with these options, and return what it prints; all tests must pass, and some must run."""
    command = [sys.executable, "-m", "pytest", *options, "--tb=short", "-p", "no:cacheprovider"]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
