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

pytestmark = pytest.mark.rows(24)

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


@pytest.mark.exhaustive
@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("cut", ["segments", "blocks"], indirect=True)
@pytest.mark.parametrize("name", ["read_keys", "per_key_t9"])
def test_cuts_mark_the_same_gradients(name):
    case = CASES[name]
    sizes = case.sizes | {"b": 1, "t": 35, "h": 1, "g": 1, "p": 18, "n": 17}
    check("nonfinite_gradients", problem(SPEC, replace(case, sizes=sizes)), "triton")


def test_gradients_that_cancel_in_16_bits():
    """A bias adds up the gradients of log decays over all tokens."""
    check("gradients", problem(SPEC, CASES["bounded_per_key"], "bfloat16"), "triton")


@pytest.mark.parametrize("axes", ["bth", "bthn"])
@pytest.mark.parametrize("limit", [None, -5.0])
def test_a_bias_with_gaps(axes, limit):
    """A column of parameters: its stride is not one."""
    torch.manual_seed(0)
    sizes = {"b": 1, "t": 20, "g": 1, "h": 2, "n": 16}
    shapes = {"q": "btgn", "k": "btgn", "v": "bthn", "g": axes, "beta": "bth", "A_log": "h"}
    given = {name: torch.randn([sizes[axis] for axis in shape]) for name, shape in shapes.items()}
    given["dt_bias"] = torch.randn(2, 2)[:, 1]
    for ours, truth in zip(*in_both(given, normalize=True, beta_limit=2.0, lower_bound=limit), strict=True):
        assert (ours - truth).norm() <= 1e-5 * truth.norm()


def in_both(given, **options):
    """Return y and all gradients, by the kernels and by torch in float64."""
    for backend in ("triton", "torch"):
        leaves = {n: (a.double() if backend == "torch" else a).detach().requires_grad_() for n, a in given.items()}
        y, _ = delta_rule(**leaves, backend=backend, **options)
        weights = torch.arange(y.numel()).view_as(y).sin().to(y.dtype)
        yield [y, *torch.autograd.grad((y * weights).sum(), list(leaves.values()))]


@pytest.mark.parametrize("strong", [0.0, -5.0, -30.0, -60.0])
def test_tokens_of_one_reference(strong):
    """Sixteen tokens have one, unless their decays are too strong; no gradient of a decay is lost beside others."""
    torch.manual_seed(0)
    sizes = {"b": 1, "t": 70, "h": 1, "n": 16}
    given = {name: torch.randn([sizes[a] for a in "bthn"], dtype=torch.bfloat16) for name in ("q", "k", "v")}
    given |= {"g": -0.1 * torch.rand([sizes[a] for a in "bthn"]), "beta": torch.rand([sizes[a] for a in "bth"])}
    given["g"][:, 20:28] = min(strong, -5.0)
    given["g"][:, 23] = strong
    ours, truths = in_both(given, normalize=True)
    for name, found, truth in zip(["y", *given], ours, truths, strict=True):
        assert (found - truth).norm() <= 2e-2 * truth.norm(), name
    at = given["g"] < -1.0
    dg = 1 + list(given).index("g")
    assert (ours[dg] - truths[dg])[at].norm() <= 5e-2 * truths[dg][at].norm()
