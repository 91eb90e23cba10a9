"""A marker for pytest: a test passes only if `refold.judge` accepts a candidate.

    @pytest.mark.refold_verify(original="layer.py", candidate="fast.py", level="quick", accept="right")
    def test_the_fast_layer(refold_verdict):
        assert refold_verdict.accepted

Files are looked for next to the test. Options are those of `refold.judge.judge`. The body of the test runs after the
verdict; the fixture ``refold_verdict`` is the verdict, and may be left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

_MARK = "refold_verify"


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers", f"{_MARK}(original, candidate, **options): the candidate must be accepted in place of the original"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let marked tests have the verdict, whether they ask for it or not."""
    for item in items:
        names = getattr(item, "fixturenames", None)
        if item.get_closest_marker(_MARK) is not None and names is not None and "refold_verdict" not in names:
            names.append("refold_verdict")


@pytest.fixture(scope="session")
def _refold_nursery() -> Any:
    from refold.judge import Nursery

    with Nursery(threads=1) as nursery:
        yield nursery


@pytest.fixture
def refold_verdict(request: pytest.FixtureRequest, _refold_nursery: Any) -> Any:
    """Give the verdict on the marked candidate; the test fails if that is not accepted."""
    from refold.judge import judge, judge_solution

    mark = request.node.get_closest_marker(_MARK)
    if mark is None or mark.args or not {"original", "candidate"} <= mark.kwargs.keys():
        pytest.fail(f"mark the test by {_MARK}(original=..., candidate=...)", pytrace=False)
    options = dict(mark.kwargs)
    here = Path(request.path).parent
    first, second = (
        side if callable(side) else str(here / side) for side in (options.pop("original"), options.pop("candidate"))
    )
    options = {"threads": 1, "nursery": _refold_nursery} | options
    if str(first).endswith(".json"):
        *_, (verdict, _) = judge_solution(first, second, **options)
    else:
        verdict = judge(first, second, **options)
    if not verdict.accepted:
        pytest.fail(str(verdict), pytrace=False)
    return verdict
