"""A test of over ten seconds without the mark ``slow`` fails, times are stored, and some rows are exhaustive."""

import json
import re
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]


@pytest.fixture
def run(pytester, monkeypatch):
    """Return a function that runs tests with the conftest of this folder, but another limit."""
    source = (Path(__file__).parents[1] / "conftest.py").read_text()
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))

    def go(tests, *options):
        (pytester.path / "tests").mkdir()
        (pytester.path / "tests" / "conftest.py").write_text(
            source.replace("LIMIT = 10", "LIMIT = 0.05").replace("BUSY = 1.5", "BUSY = 1e9")
        )
        (pytester.path / "tests" / "test_x.py").write_text(tests)
        return pytester.runpytest_subprocess("tests", "-p", "no:cacheprovider", *options)

    return go


def test_a_long_test_fails_unless_it_is_marked(run, pytester):
    result = run(
        "import pytest, time\n"
        "def work():\n"
        "    end = time.process_time() + 0.1\n"
        "    while time.process_time() < end: pass\n"
        "def test_short(): pass\n"
        "def test_long(): work()\n"
        "@pytest.mark.slow\n"
        "def test_marked(): work()\n"
    )
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*took 0 s of the processor: make it shorter, or mark it slow*"])
    files, tests = json.loads((pytester.path / "build" / "durations.json").read_text())
    assert files["tests/test_x.py"] > 0.15
    assert list(tests)[-1] == "tests/test_x.py::test_short"


def test_one_row_in_so_many_is_not_exhaustive(run):
    result = run(
        "import pytest\n"
        "pytestmark = pytest.mark.rows(3)\n"
        "@pytest.mark.parametrize('i', range(9))\n"
        "def test_rows(i): pass\n"
        "@pytest.mark.parametrize(('i', 'j'), [(k, k) for k in range(6)])\n"
        "@pytest.mark.parametrize('k', range(6))\n"
        "def test_products(i, j, k): print('product', i, k)\n"
        "@pytest.fixture(params=range(6))\n"
        "def way(request): pass\n"
        "def test_fixtures(way): pass\n"
        "@pytest.mark.parametrize('i', [0])\n"
        "def test_single(i): pass\n"
        "@pytest.mark.rows(1)\n"
        "@pytest.mark.parametrize('i', range(5))\n"
        "def test_all(i): pass\n"
        "@pytest.mark.parametrize('i', [0, 1, pytest.param(2, marks=pytest.mark.exhaustive)])\n"
        "def test_by_itself(i): pass\n",
        *("-m", "not exhaustive", "-s"),
    )
    result.assert_outcomes(passed=3 + 12 + 2 + 1 + 5 + 2, deselected=6 + 24 + 4 + 1)
    found = set(re.findall(r"product (\d) (\d)", result.stdout.str()))
    assert [{row[at] for row in found} for at in (0, 1)] == [set("012345")] * 2
