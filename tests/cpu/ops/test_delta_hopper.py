"""The Hopper kernel of the delta rule, interpreted: lengths, packs, segments, decays per key, values not finite."""

import os
from importlib import import_module

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run by test_triton_interpreted, in a process of its own", allow_module_level=True)

from refold.ops.delta_rule.reference import delta_rule as reference  # noqa: E402
from refold.ops.delta_rule.tables import BACKWARD, FORWARD  # noqa: E402
from support import gluon  # noqa: E402

KERNELS = [
    f"refold.ops.delta_rule._gluon_{part}_kernels"
    for part in ("chain", "chain_back", "prepare", "pairs", "keyed_pairs")
]
plans = import_module("refold.ops.delta_rule._triton_forward")
backward = import_module("refold.ops.delta_rule._triton_backward")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
    pytest.mark.rows(6),
]  # of NaN, by NumPy


@pytest.fixture
def launched(monkeypatch):
    """Plan as for an H200, run the kernel in Gluon with torch, and list what runs."""
    names = gluon.launched(monkeypatch, *KERNELS)
    for module, table in ((plans, FORWARD), (backward, BACKWARD)):
        monkeypatch.setattr(module, "lookup", lambda *_, table=table: table.default | table.families["hopper"])
    monkeypatch.setattr(plans, "hopper_fits", lambda *tensors: all(map(plans._fits_copy_engine, tensors)))
    return names


def given(t, n=64, p=64, keyed=False, lengths=None):
    """Return arrays of a call: two heads of one group, a reset among weak decays, keys that repeat."""
    torch.manual_seed(0)
    half = {"dtype": torch.bfloat16}
    g = -0.3 * torch.rand(1, t, 2, n) if keyed else -0.3 * torch.rand(1, t, 2)
    g[:, t // 3] = -200.0
    arrays = {
        "q": torch.randn(1, t, 1, n, **half), "k": torch.randn(1, t, 1, n, **half),
        "v": torch.randn(1, t, 2, p, **half), "g": g, "beta": 2.0 * torch.rand(1, t, 2),
        "initial_state": torch.randn(len(lengths or [t]), 2, n, p),
    }  # fmt: skip
    arrays["k"][:, t // 2 : t // 2 + 4] = arrays["k"][:, t // 2 : t // 2 + 1]
    if lengths:
        arrays["cu_seqlens"] = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0)
    return arrays


def compare(arrays, config, erase=True):
    """Compare a plan's results with those of float64; what is not finite must not be finite there."""
    names = [arg.name for arg in plans.SPEC.args]
    options = {"scale": None, "normalize": True, "lower_bound": None, "beta_limit": None, "erase": erase}
    full = dict.fromkeys(names) | arrays
    plan = plans.delta_rule.make(**full, **options, chunk_size=None, config=config)
    found = plan(*[full[name] for name in names])
    numpy = {name: None if a is None else a.numpy() if name == "cu_seqlens" else a.double().numpy()
             for name, a in full.items()}  # fmt: skip
    for ours, truth in zip(found, reference(**numpy, **options), strict=True):
        truth = torch.from_numpy(truth)
        finite = truth.isfinite()
        assert torch.equal(ours.isfinite(), finite)
        error = torch.where(finite, ours - truth, 0.0).norm() / torch.where(finite, truth, 0.0).norm()
        assert error < 1e-2, f"{error:.1e}"


@pytest.mark.parametrize(
    ("sizes", "config", "erase"),
    [
        ({"t": 1}, {}, True),
        ({"t": 130, "n": 96, "p": 72}, {}, True),
        ({"t": 200}, {"segments": 3}, True),
        ({"t": 140, "lengths": [0, 5, 65, 0, 70]}, {"segments": 2}, True),
        ({"t": 100, "keyed": True}, {}, True),
        ({"t": 130, "keyed": True, "lengths": [64, 66]}, {"segments": 2}, False),
    ],
)
def test_values(sizes, config, erase, launched):
    compare(given(**sizes), config, erase)
    assert launched.count("_delta_chain_hopper_kernel") == (2 if config else 1)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_values_that_are_not_finite(name, launched):
    """They stay at their tokens, in their sequence, head and column."""
    arrays = given(140, lengths=[70, 70])
    arrays[name][0, 80, 0] = float("nan")
    arrays[name][0, 135].view(-1)[-1] = float("inf")
    compare(arrays, {})


@pytest.mark.parametrize(
    ("sizes", "config", "erase", "spoiled"),
    [
        ({"t": 70, "n": 128, "p": 128}, {}, True, None),
        ({"t": 64, "n": 96, "p": 72}, {}, True, None),
        ({"t": 200, "n": 72}, {"segments": 3}, True, "v"),
        ({"t": 140, "lengths": [0, 5, 65, 0, 70]}, {"segments": 2}, True, "dy"),
        ({"t": 100, "keyed": True}, {}, True, "dy"),
        ({"t": 70, "n": 128, "p": 128, "keyed": True}, {}, True, None),
        ({"t": 140, "n": 96, "p": 72, "keyed": True}, {}, True, "v"),
        ({"t": 130, "keyed": True, "lengths": [64, 66]}, {}, False, None),
    ],
)
def test_gradients_are_those_of_the_plain_kernels(sizes, config, erase, spoiled, launched):
    """Also where a value is not finite: there, the plain kernels do it again."""
    arrays = given(**sizes)
    names = [arg.name for arg in plans.SPEC.args]
    full = dict.fromkeys(names) | arrays
    dy, dstate = torch.randn_like(full["v"]), torch.randn_like(full["initial_state"])
    if spoiled:
        (dy if spoiled == "dy" else full[spoiled])[0, 80, 0] = float("nan")
    options = {"lower_bound": None, "beta_limit": None, "normalize": erase, "erase": erase, "scale": None}
    found, plain = (
        backward.delta_rule_backward.make(dy=dy, dstate=dstate, needs=frozenset(names), **full, **options,
                                          chunk_size=None, config=config | plan)(dy, dstate, *full.values())
        for plan in ({}, {"hopper_pairs": 0, "hopper_chains": 0})
    )  # fmt: skip
    assert launched.count("_delta_chain_back_hopper_kernel") == (2 if config else 1)
    assert launched.count("_delta_pairs_hopper_kernel") == ("lengths" not in sizes and "keyed" not in sizes)
    assert launched.count("_delta_keyed_pairs_hopper_kernel") == ("keyed" in sizes and sizes.get("p", 64) > 64)
    for name, truth in plain.items():
        if truth is not None:
            finite = truth.isfinite()
            assert torch.equal(found[name].isfinite(), finite), name
            truth, ours = (torch.where(finite, a.double(), 0.0) for a in (truth, found[name]))
            assert (ours - truth).norm() <= 2e-2 * truth.norm(), name  # of roundings to 8 bits, one after another
