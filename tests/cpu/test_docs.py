"""The Python in the documents runs, and the output that they show is what commands print.

The blocks of one page run one after the other, in one process and one empty folder. A block with ``title="file.py"`` is
also written to that file. A line ``<!-- not run: REASON -->`` before a block leaves it out. A session with ``>>>`` is
checked line by line, as doctest does. A text block after ``<!-- passes: WHEN -->`` must be part of the graphs that the
page's run prints. Each paragraph of a text block after ``<!-- printed -->`` must be part of what the run prints, apart
from where lines break and files lie.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"(?P<before>[^\n]*)\n```python(?: title=\"(?P<title>[^\"]+)\")?\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE
)
SKIPPED = re.compile(r"<!-- not run: .+ -->")
GRAPHS = re.compile(r"<!-- passes: \w+ -->\n```text\n(.*?)```", re.DOTALL)
PRINTED = re.compile(r"<!-- printed -->\n```text\n(.*?)```", re.DOTALL)

# Runs a session in the names of the page, and leaves there what it defines.
SESSION = """
import doctest
_test = doctest.DocTestParser().get_doctest({0!r}, globals(), "session", None, 0)
_test.globs = globals()
assert not doctest.DocTestRunner().run(_test, clear_globs=False).failed
"""

# Imports what most pages import, once: that takes longer than most pages. Runs each page in a process forked from it.
NURSERY = f"""
import os, runpy, signal, sys, traceback
import torch, refold.compiler.backend
sys.path.append({str(ROOT / "tests")!r})
from support.machine_code import keep_machine_code
sys.path.pop()
keep_machine_code(load=True)
for folder in map(str.strip, sys.stdin):
    child = os.fork()
    if not child:
        code = 1
        try:
            os.chdir(folder)
            sys.path[0] = folder
            for number, name in ((1, "printed"), (2, "errors")):
                os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
            signal.alarm(300)
            runpy.run_path("page.py", run_name="__main__")
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    print(os.waitpid(child, 0)[1], flush=True)
"""


@pytest.fixture(scope="module")
def nursery():
    with subprocess.Popen(
        [sys.executable, "-c", NURSERY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "REFOLD_LOG_GRAPHS": "1"},
    ) as process:  # fmt: skip
        yield process


def blocks(page):
    return [found for found in BLOCK.finditer(page.read_text()) if not SKIPPED.match(found["before"])]


RUN = [page for page in PAGES if blocks(page)]


@pytest.mark.parametrize("page", RUN, ids=[page.relative_to(ROOT).as_posix() for page in RUN])
def test_python_of_a_page_runs(page, tmp_path, nursery):
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
    nursery.stdin.write(f"{tmp_path}\n")
    nursery.stdin.flush()
    status, errors = nursery.stdout.readline().strip(), (tmp_path / "errors").read_text()
    assert status == "0", (tmp_path / "printed").read_text()[-2000:] + errors[-2000:]
    printed = re.sub(r"torch\.ops\.|\.(default|Tensor|dim_IntList)\b|;.*", "", errors)
    printed = printed.replace("arg0_1", "q").replace("arg1_1", "k")
    for graph in GRAPHS.findall(page.read_text()):
        for line in graph.splitlines():
            assert line in printed
    said = unfolded((tmp_path / "printed").read_text())
    for sample in PRINTED.findall(page.read_text()):
        for paragraph in sample.split("\n\n"):
            assert unfolded(paragraph) in said


def unfolded(text):
    """Return text as one line, without what depends on the place of files."""
    return re.sub(r"[\w/.-]+\.py:\d+", "FILE", " ".join(text.split()))


def test_the_page_on_how_it_works_shows_a_graph_before_and_after():
    assert len(GRAPHS.findall((ROOT / "docs" / "how-it-works.md").read_text())) == 2


@pytest.mark.slow
def test_the_sample_of_the_readme_is_what_the_command_prints(without_code, monkeypatch):
    from refold.cli import app

    sample = re.search(r"\$ refold optimize (\S+)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(app, ["optimize", sample[1], "-q", "--accept", "always"])
    assert done.exit_code == 0, done.output

    def shape(line):
        """Return a line without what differs between machines: errors, and the folder that the file lies in."""
        return re.sub(r"\d\.\de[-+]\d\d", "#", line).replace(f"{ROOT}/", "").strip()

    printed = {shape(line) for line in done.stdout.splitlines()}
    for line in sample[2].splitlines():
        assert shape(line) in printed
