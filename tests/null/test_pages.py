"""Pages say what the code says, in the words that CONTRIBUTING.md asks for."""

import re
from pathlib import Path

import pytest

from refold.verify.trial.verdict import CHECKS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "LOG.md", *(ROOT / "docs").rglob("*.md")]
# Words to avoid, and what to write: of time, "behind" and "in front of" are misread.
PLAIN = {"behind": "after", "in front of": "before", "beside": "next to", "nobody": "who or what it is"}


def test_the_page_on_verification_lists_each_check_of_a_trial():
    rows = re.findall(r"^\| ([A-Z]\d+) \| (.+) \|$", (ROOT / "docs" / "verification.md").read_text(), re.MULTILINE)
    assert dict(rows) == CHECKS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_use_plain_words(page):
    found = [word for word in PLAIN if re.search(rf"\b{word}\b", page.read_text(), re.IGNORECASE)]
    assert not found, f"write {', '.join(repr(PLAIN[word]) for word in found)} in place of {found}"
