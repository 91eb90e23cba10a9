"""Tables that are both in the code and on a page are equal."""

import re
from pathlib import Path

from refold.verify.trial.verdict import CHECKS

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_on_verification_lists_each_check_of_a_trial():
    rows = re.findall(r"^\| ([A-Z]\d+) \| (.+) \|$", (DOCS / "verification.md").read_text(), re.MULTILINE)
    assert dict(rows) == CHECKS
