"""A test that takes more than ten seconds without the mark ``slow`` fails, and what tests take is stored."""

import json
from pathlib import Path

pytest_plugins = ["pytester"]


def test_a_long_test_fails_unless_it_is_marked(pytester, monkeypatch):
    source = (Path(__file__).parents[1] / "conftest.py").read_text()
    (pytester.path / "tests").mkdir()
    (pytester.path / "tests" / "conftest.py").write_text(
        source.replace("LIMIT = 10", "LIMIT = 0.05").replace("BUSY = 1.5", "BUSY = 1e9")
    )
    (pytester.path / "tests" / "test_x.py").write_text(
        "import pytest, time\n"
        "def work():\n"
        "    end = time.process_time() + 0.1\n"
        "    while time.process_time() < end: pass\n"
        "def test_short(): pass\n"
        "def test_long(): work()\n"
        "@pytest.mark.slow\n"
        "def test_marked(): work()\n"
    )
    result = pytester.runpytest_subprocess("tests", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*took 0 s of the processor: make it shorter, or mark it slow*"])
    files, tests = json.loads((pytester.path / "build" / "durations.json").read_text())
    assert files["tests/test_x.py"] > 0.15
    assert list(tests)[-1] == "tests/test_x.py::test_short"
