"""Tables and figures show the results that are stored."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_tables_are_not_stale():
    subprocess.run([sys.executable, "tools/render_tables.py", "--check"], cwd=ROOT, check=True, timeout=300)


def test_figures_are_not_stale():
    from refold.bench import plots

    assert plots.stale(ROOT / "benchmarks" / "results", ROOT / "docs" / "figures") == []


def test_a_figure_of_other_rows_is_stale(tmp_path):
    from refold.bench import plots

    figures = tmp_path / "figures"
    figures.mkdir()
    for path in (ROOT / "docs" / "figures").glob("*.svg"):
        (figures / path.name).write_text(path.read_text())
    path = figures / "length.svg"
    path.write_text(path.read_text().replace("drawn from rows", "drawn from rows 0"))
    assert plots.stale(ROOT / "benchmarks" / "results", figures) == ["length"]


def test_drawing_the_same_rows_gives_the_same_bytes(tmp_path):
    pytest.importorskip("matplotlib")
    from refold.bench import plots

    results = ROOT / "benchmarks" / "results"
    (first,) = plots.draw("length", results, tmp_path / "a")
    (second,) = plots.draw("length", results, tmp_path / "b")
    assert first.read_bytes() == second.read_bytes()
    assert ">mamba-ssm<" in first.read_text()
