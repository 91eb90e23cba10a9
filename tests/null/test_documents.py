"""Documents quote stored results, and only those."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_tables_are_rendered_from_stored_results():
    done = subprocess.run(
        [sys.executable, "tools/render_tables.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
