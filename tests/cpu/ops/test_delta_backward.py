"""Backward of the delta rule in Triton, interpreted: segments of a sequence, and keys and values in blocks."""

import os
from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run by test_triton_interpreted, in a process of its own", allow_module_level=True)

import torch

from refold.ops import delta_rule
from refold.ops.delta_rule.tables import BACKWARD
from refold.ops.spec import load
from refold.ops.testing import check, problem
from refold.ops.torch import tables

pytestmark = pytest.mark.rows(3)

SPEC = load("delta_rule")
CASES = {case.name: case for case in SPEC.cases()}
CUTS = {
    "segments": {"segments": 3},
    "blocks": {"segments": 1, "block_p": 16, "pairs_p": 16, "keyed_n": 16},
    "wide_values": {"segments": 1, "pairs_p": 32, "keyed_n": 16},
    "wide_keys": {"segments": 2, "pairs_p": 16, "keyed_n": 32},
}


@pytest.fixture(params=CUTS)
def cut(request, monkeypatch):
    """Cut in one of these ways."""
    monkeypatch.setitem(BACKWARD.dtypes, "float32", BACKWARD.dtypes["float32"] | CUTS[request.param])
    tables.lookup.cache_clear()
    yield
    tables.lookup.cache_clear()


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("name", ["one_group", "read_keys", "linear_gated", "read_keys_per_key", "linear_per_key"])
def test_cuts_change_nothing(name):
    case = CASES[name]
    sizes = case.sizes | {"b": 1, "t": 51, "h": 2, "p": 20, "n": 18}
    check("gradients", problem(SPEC, replace(case, sizes=sizes)), "triton")


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("name", ["packed", "packed_per_key"])
def test_cuts_of_a_pack(name):
    case = CASES[name]
    sizes = case.sizes | {"t": 55, "h": 2, "g": 1}
    check("gradients", problem(SPEC, replace(case, sizes=sizes, lengths=(0, 5, 49, 0, 1))), "triton")


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("cut", ["segments", "blocks"], indirect=True)
@pytest.mark.parametrize("name", ["read_keys", "per_key_t9"])
def test_cuts_mark_the_same_gradients(name):
    case = CASES[name]
    sizes = case.sizes | {"b": 1, "t": 35, "h": 1, "g": 1, "p": 18, "n": 17}
    check("nonfinite_gradients", problem(SPEC, replace(case, sizes=sizes)), "triton")


@pytest.mark.parametrize("axes", ["bth", "bthn"])
@pytest.mark.parametrize("limit", [None, -5.0])
def test_a_bias_with_gaps(axes, limit):
    """A column of parameters: its stride is not one."""
    torch.manual_seed(0)
    sizes = {"b": 1, "t": 20, "g": 1, "h": 2, "n": 16}
    shapes = {"q": "btgn", "k": "btgn", "v": "bthn", "g": axes, "beta": "bth", "A_log": "h"}
    given = {name: torch.randn([sizes[axis] for axis in shape]) for name, shape in shapes.items()}
    given["dt_bias"] = torch.randn(2, 2)[:, 1]
    results = []
    for backend in ("triton", "torch"):
        leaves = {name: array.detach().requires_grad_() for name, array in given.items()}
        y, _ = delta_rule(**leaves, normalize=True, beta_limit=2.0, lower_bound=limit, backend=backend)
        results.append([y, *torch.autograd.grad(y.square().sum(), list(leaves.values()))])
    for ours, truth in zip(*results, strict=True):
        assert (ours - truth).norm() <= 1e-5 * truth.norm()
