"""Slow tests, which `make test` leaves out where all that they guard is as it was when they passed."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("exhaustive", Path(__file__).parents[2] / "tools" / "exhaustive.py")
exhaustive = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(exhaustive)


def mark_slow(items: Sequence[pytest.Item]) -> None:
    """Mark the tests of tests/slow.json ``slow``, and those ``passed`` of which tools/exhaustive.py says so."""
    known, passed = exhaustive.slow(), exhaustive.passed()
    for item in items:
        if item.nodeid in known:
            item.add_marker("slow")
        if item.nodeid in passed:
            item.add_marker("passed")
