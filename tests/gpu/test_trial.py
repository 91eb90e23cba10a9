"""The judge with a GPU: attacks are refused, honest candidates pass."""

import ast
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from refold.judge import Judge, Nursery, Terms, program  # noqa: E402

pytestmark = pytest.mark.gpu
ATTACKS = Path(__file__).parent / "attacks"
CANDIDATES = sorted(path for path in ATTACKS.glob("*.py") if path.stem != "original")


@pytest.fixture(scope="module")
def nursery():
    with Nursery(threads=1, device="cuda") as nursery:
        yield nursery


def said(path):
    """Read what is expected of a candidate, without running it."""
    names = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign) and node.targets[0].id.isupper()
    }
    expect = names["EXPECT"]
    return {expect} if isinstance(expect, str) else set(expect), names.get("TERMS", {})


@pytest.mark.parametrize("path", CANDIDATES, ids=lambda path: path.stem)
def test_the_verdict_is_the_expected_one(path, nursery):
    expect, terms = said(path)
    first = program(ATTACKS / "original.py", role="original")
    options = {"accept": "right", "timeout": 40.0, "device": "cuda", "level": "full"} | terms
    verdict = Judge(nursery).decide(first, program(path, role="candidate"), None, Terms(**options), seed=20)
    assert (verdict.check or verdict.outcome) in expect, str(verdict)
