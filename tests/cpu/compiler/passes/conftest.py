"""Passes: most tests generate no code."""

import pytest


@pytest.fixture(autouse=True)
def _without_code(without_code):
    """What a graph becomes, and its values; tests marked ``codegen`` show that code is made of it, too."""
