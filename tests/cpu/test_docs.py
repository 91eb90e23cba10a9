"""The Python in the documents runs, and the output that they show is what commands print.

The blocks of one page run one after the other, in one process and one empty folder. A block with ``title="file.py"`` is
also written to that file. A line ``<!-- not run: REASON -->`` before a block leaves it out. A session with ``>>>`` is
checked line by line, as doctest does. A text block after ``<!-- passes: WHEN -->`` must be part of the graphs that the
page's run prints.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"(?P<before>[^\n]*)\n```python(?: title=\"(?P<title>[^\"]+)\")?\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE
)
SKIPPED = re.compile(r"<!-- not run: .+ -->")
GRAPHS = re.compile(r"<!-- passes: \w+ -->\n```text\n(.*?)```", re.DOTALL)

# Runs a session in the names of the page, and leaves there what it defines.
SESSION = """
import doctest
_test = doctest.DocTestParser().get_doctest({0!r}, globals(), "session", None, 0)
_test.globs = globals()
assert not doctest.DocTestRunner().run(_test, clear_globs=False).failed
"""


def blocks(page):
    return [found for found in BLOCK.finditer(page.read_text()) if not SKIPPED.match(found["before"])]


RUN = [page for page in PAGES if blocks(page)]


@pytest.mark.parametrize("page", RUN, ids=[page.relative_to(ROOT).as_posix() for page in RUN])
def test_python_of_a_page_runs(page, tmp_path):
    if "transformers" in page.read_text():
        pytest.importorskip("transformers")
    program = []
    for found in blocks(page):
        code = found["code"]
        if found["title"]:
            (tmp_path / found["title"]).write_text(code)
            if "ModelNew" in code:
                continue  # it is a candidate: nothing here runs it
        program.append(SESSION.format(code) if code.startswith(">>>") else code)
    # As a file: classes and functions must have lines that can be read.
    (tmp_path / "page.py").write_text("\n".join(program))
    done = subprocess.run(
        [sys.executable, "page.py"], capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False,
        env={**os.environ, "REFOLD_LOG_GRAPHS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    printed = re.sub(r"torch\.ops\.|\.(default|Tensor|dim_IntList)\b|;.*", "", done.stderr)
    printed = printed.replace("arg0_1", "q").replace("arg1_1", "k")
    for graph in GRAPHS.findall(page.read_text()):
        for line in graph.splitlines():
            assert line in printed


def test_the_page_on_how_it_works_shows_a_graph_before_and_after():
    assert len(GRAPHS.findall((ROOT / "docs" / "how-it-works.md").read_text())) == 2


def test_the_sample_of_the_readme_is_what_the_command_prints():
    sample = re.search(r"\$ refold optimize (\S+)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-m", "refold", "optimize", sample[1], "-q", "--accept", "always"],
        capture_output=True, text=True, cwd=ROOT, timeout=300, check=True,
    )  # fmt: skip

    def shape(line):
        """Return a line without what differs between machines: errors, and the folder that the file lies in."""
        return re.sub(r"\d\.\de[-+]\d\d", "#", line).replace(f"{ROOT}/", "").strip()

    printed = {shape(line) for line in done.stdout.splitlines()}
    for line in sample[2].splitlines():
        assert shape(line) in printed
