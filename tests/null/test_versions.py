"""Every place that names versions of other packages names the tested ones, and nothing holds newer ones back."""

import re
import tomllib

import pytest

from null.source import ROOT, tool
from refold import versions
from refold.errors import RefoldWarning

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = [one for some in PROJECT["optional-dependencies"].values() for one in some]


def test_metadata_has_no_upper_bounds():
    required = [*PROJECT["dependencies"], *EXTRAS, "python" + PROJECT["requires-python"]]
    assert len(required) > 10
    assert not [one for one in required if re.search(r"[<~]|==|!=", one)]


@pytest.mark.parametrize("package", versions.TESTED)
def test_the_lower_bound_is_the_oldest_tested_release(package):
    required = [*EXTRAS, "python" + PROJECT["requires-python"]]
    assert f"{package}>={versions.TESTED[package][0]}" in required


@pytest.mark.parametrize("page", ["README.md", "docs/limits.md"])
@pytest.mark.parametrize("package", versions.TESTED)
def test_pages_name_the_tested_releases(page, package):
    text = " ".join((ROOT / page).read_text().split())
    assert versions.tested(package) in text


def test_releases_are_compared_by_their_first_two_numbers():
    assert versions.release("2.15.0+cu130") == (2, 15)
    assert versions.release("3.11.0rc1") == (3, 11)
    assert [versions.is_tested("torch", v) for v in ("2.10.9", "2.11.0", "2.15.9+cpu", "2.16.0a0")] == [0, 1, 1, 0]


def test_the_page_shows_the_stored_rows():
    page, rows = (ROOT / "docs" / "versions.md").read_text(), tool("versions")
    assert rows.rows()
    assert rows.rendered(page) == page


def test_a_loss_is_said_once_and_listed():
    with pytest.warns(
        RefoldWarning, match=r"this is slower: no name. Results are the same. Use torch 2.11 to 2.15, or"
    ):
        versions.lose("this is slower", "no name")
    versions.lose("this is slower", "no name")  # another warning would be an error
    assert versions.losses() == ["this is slower: no name"]
    assert versions.losses([("torch", "2.15.1"), ("numpy", "9.9")]) == ["this is slower: no name"]
    (known, *_), new = versions.losses([("torch", "2.12.0")])[1:], versions.losses([("torch", "2.16.0")])[1:]
    assert known.endswith("torch 2.12.0 is older than 2.13")
    assert new == [f"{versions.UNTESTED['torch']}: torch 2.16.0 was not tested, torch 2.11 to 2.15 were"]
