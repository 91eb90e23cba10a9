"""Pages say what the code says, in the words that CONTRIBUTING.md asks for."""

import re

import pytest

from null.source import ROOT, tool
from refold.judge.verdict import CHECKS
from refold.ops.spec import operators

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "LOG.md",
         *(ROOT / "benchmarks" / "log").iterdir(), *(ROOT / "docs").rglob("*.md")]  # fmt: skip
# Words to avoid, and what to write: of time, "behind" and "in front of" are misread.
PLAIN = {"behind": "after", "in front of": "before", "beside": "next to", "nobody": "who or what it is"}


def test_the_page_on_verification_lists_each_check_of_a_trial():
    rows = re.findall(r"^\| ([A-Z]\d+) \| (.+) \|$", (ROOT / "docs" / "verification.md").read_text(), re.MULTILINE)
    assert dict(rows) == CHECKS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_use_plain_words(page):
    found = [word for word in PLAIN if re.search(rf"\b{word}\b", page.read_text(), re.IGNORECASE)]
    assert not found, f"write {', '.join(repr(PLAIN[word]) for word in found)} in place of {found}"


def test_the_compilers_page_lists_each_pass():
    passes = re.findall(
        r'^    Pass\("([^"]+)", \w+(?:, \w+)?\),$', (ROOT / "src/refold/compiler/pipeline.py").read_text(), re.MULTILINE
    )
    rows = re.findall(r"^\| ([^|`]+) \| [^|]+ \| .+ \|$", (ROOT / "docs" / "compiler.md").read_text(), re.MULTILINE)
    assert len(passes) > 9
    assert set(passes) <= set(rows)


@pytest.mark.parametrize("name", operators())
def test_pages_have_each_operator(name):
    assert f"\n| `{name}` | " in (ROOT / "docs" / "operators.md").read_text(), "add a row to the table of operators"
    assert f"`{name}`" in (ROOT / "docs" / "numerics.md").read_text(), "measure its errors: tools/numerics.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_that_a_page_names_exist(page):
    named = re.findall(r"(?<![\w/.:(-])(?:src|tests|tools|docs|benchmarks|examples)/[\w./-]*\w", page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_a_page_of_an_operator_is_no_source():
    """Its sections are prose and lists; only equations and examples are code."""
    site = tool("site")
    nav = site.on_config({"nav": ["index.md", {"Home": "a.md"}, {"Reference": ["operators.md"]}]})["nav"]
    for name in operators():
        assert f"operators/{name}.md" in nav[2]["Reference"]
        page = site.operator_page(name)
        assert "::\n" not in page
        assert "'Any'" not in page
        code = [line for line in page.splitlines() if line.startswith("    ")]
        assert not [line for line in code if "``" in line], "prose that is indented is shown as code"
        assert max(map(len, page.split("```")[1].splitlines())) < 90


def test_the_code_that_a_decision_shapes_cites_it():
    decisions = re.findall(r"^(\d+)\. \*\*", (ROOT / "docs" / "design.md").read_text(), re.MULTILINE)
    text = "".join(path.read_text() for folder in ("src", "tests") for path in (ROOT / folder).rglob("*.py"))
    assert decisions == [str(i + 1) for i in range(len(decisions))]
    assert len(decisions) <= 30
    assert set(re.findall(r"[Dd]esign decision (\d+)", text)) == set(decisions)
