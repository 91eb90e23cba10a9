"""Documents quote stored results, and only those."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("what", ["tables", "figures"])
def test_show_stored_results(what):
    done = subprocess.run(
        [sys.executable, f"tools/render_{what}.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
