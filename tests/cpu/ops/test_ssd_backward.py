"""Backward of ssd in Triton, interpreted: blocks and splits of heads, wide heads and states, one result alone."""

import os
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run by test_triton_interpreted, in a process of its own", allow_module_level=True)

import refold.ops  # noqa: E402
from refold.ops.spec import load  # noqa: E402
from refold.ops.ssd.tables import BACKWARD  # noqa: E402
from refold.ops.testing import check, problem  # noqa: E402
from refold.ops.torch import tables  # noqa: E402

pytestmark = pytest.mark.rows(12)

SPEC = load("ssd")
CASES = {case.name: case for case in SPEC.cases()}
CUTS = {
    "a_head_at_a_time": {"memory": 0, "most_memory": 0},
    "splits": {"splits": 2},
    "blocks_and_splits": {"memory": 0, "most_memory": 0, "splits": 2},
    "channels_and_states_in_blocks": {"block_p": 16, "block_n": 16},
}


@pytest.fixture
def cut_by(monkeypatch):
    """Return the configuration that cuts heads and tiles in one of these ways."""

    def cut_by(cut):
        monkeypatch.setitem(BACKWARD.dtypes, "float32", BACKWARD.dtypes["float32"] | CUTS[cut])
        tables.lookup.cache_clear()

    yield cut_by
    tables.lookup.cache_clear()


@pytest.mark.parametrize("cut", CUTS)
def test_cuts_change_nothing(cut, cut_by):
    cut_by(cut)
    case = CASES["one_group"]
    sizes = case.sizes | {"t": 35, "h": 3, "p": 20, "n": 18}
    check("gradients", problem(SPEC, replace(case, name=cut, sizes=sizes)), "triton")


@pytest.mark.exhaustive
@pytest.mark.parametrize("cut", ["blocks_and_splits", "channels_and_states_in_blocks"])
def test_what_is_not_finite_stays_in_its_place(cut, cut_by):
    """Each block of heads, and each block of states, is done again by itself."""
    cut_by(cut)
    case = CASES["one_group"]
    sizes = case.sizes | {"b": 1, "t": 35, "h": 2, "p": 18, "n": 18}
    check("nonfinite_gradients", problem(SPEC, replace(case, name=cut, sizes=sizes)), "triton")


@pytest.mark.parametrize("result", [0, 1])
def test_gradients_of_one_result(result):
    torch.manual_seed(0)
    x, z = torch.randn(2, 20, 4, 5), torch.randn(2, 20, 4, 5)
    dt, A, B, C = torch.rand(2, 20, 4), -torch.rand(4), torch.randn(2, 20, 2, 6), torch.randn(2, 20, 2, 6)
    initial = torch.randn(2, 4, 5, 6)
    leaves = [a.requires_grad_() for a in (x, dt, A, B, C, z, initial)]
    found, wanted = (
        torch.autograd.grad(
            refold.ops.ssd(*leaves[:5], z=z, initial_state=initial, backend=backend)[result].square().sum(), leaves,
            allow_unused=True,
        )
        for backend in ("triton", "torch")
    )  # fmt: skip
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
