"""The judge with a GPU: attacks are refused, honest candidates pass."""

import ast
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from refold.judge import Nursery, Terms, decide, program  # noqa: E402

pytestmark = pytest.mark.gpu
ATTACKS = Path(__file__).parent / "attacks"
CANDIDATES = sorted(path for path in ATTACKS.glob("*.py") if path.stem != "original")


# A trial at level full has five processes, and two more for torch.compile and the heap, each with a context of its own.
PROCESSES, EACH = 7, 700 << 20


@pytest.fixture(scope="module")
def nursery():
    free, total = torch.cuda.mem_get_info()
    if free < PROCESSES * EACH:
        pytest.skip(
            f"{free >> 20} MB of {total >> 20} MB are free, which is enough for {free // EACH} processes; "
            f"a trial has {PROCESSES}"
        )
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
def test_the_verdict_is_the_expected_one(path, nursery, record_property):
    expect, terms = said(path)
    first = program(ATTACKS / "original.py", role="original")
    options = {"accept": "right", "timeout": 40.0, "device": "cuda", "level": "full"} | terms
    verdict = decide(nursery, first, program(path, role="candidate"), None, Terms(**options), seed=20)
    record_property("decided_by", verdict.check or verdict.outcome)
    assert (verdict.check or verdict.outcome) in expect, str(verdict)
