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
from support.products import few  # noqa: E402

KERNELS = [
    f"refold.ops.delta_rule._gluon_{part}_kernels"
    for part in ("chain", "chain_back", "prepare", "keyed", "pairs", "keyed_pairs")
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
    monkeypatch.setattr(plans, "hopper_fits", lambda *tensors: all(map(plans.copyable, tensors)))
    return names


def given(t, n=64, p=64, keyed=False, lengths=None, decay=0.3):
    """Return arrays of a call: two heads of one group, a reset among weak decays, keys that repeat."""
    torch.manual_seed(0)
    half = {"dtype": torch.bfloat16}
    g = -decay * torch.rand(1, t, 2, n) if keyed else -decay * torch.rand(1, t, 2)
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


def compare(arrays, config, erase=True, **more):
    """Compare a plan's results with those of float64; what is not finite must not be finite there."""
    names = [arg.name for arg in plans.SPEC.args]
    options = {"scale": None, "normalize": True, "lower_bound": None, "beta_limit": None, "erase": erase}
    options |= more
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


KEYED = "_delta_prepare_keyed_hopper_kernel"


@pytest.mark.parametrize(
    ("sizes", "erase"),
    [
        ({"t": 70, "n": 128}, True),
        ({"t": 70, "n": 128}, False),
        ({"t": 70, "decay": 3.0}, True),  # 16 tokens have one reference, but not 64
        ({"t": 130, "n": 96, "p": 72, "decay": 9.0}, True),  # 16 tokens decay too much for one reference
        ({"t": 140, "decay": 9.0, "lengths": [0, 5, 65, 0, 70]}, True),
        ({"t": 140, "n": 72, "decay": 20.0, "lengths": [70, 70]}, False),
    ],
)
def test_a_decay_per_key(sizes, erase, launched):
    compare(given(**sizes, keyed=True), {}, erase, normalize=erase)
    assert launched.count(KEYED) == 1
    assert "_delta_decay_kernel" not in launched


@pytest.mark.parametrize("gate", ["softplus", "bounded", "bounded_A", "sigmoid", "none"])
def test_gates_and_strengths_with_a_decay_per_key(gate, launched):
    arrays, options = given(70, keyed=True), {}
    if gate in ("softplus", "bounded", "bounded_A"):
        arrays["g"] = 2.0 * torch.randn_like(arrays["g"])
        arrays["dt_bias"] = torch.randn(2, 64)
    if gate in ("softplus", "bounded_A"):
        arrays["A_log"] = torch.randn(2)
    if gate in ("bounded", "bounded_A"):
        options["lower_bound"] = -5.0
    if gate == "sigmoid":
        arrays["beta"], options["beta_limit"] = torch.randn(1, 70, 2), 2.0
    if gate == "none":
        del arrays["beta"]
    compare(arrays, {}, **options)
    assert KEYED in launched


@pytest.mark.parametrize("erase", [True, False])
@pytest.mark.parametrize("name", ["q", "k", "v", "beta", "g"])
def test_values_that_are_not_finite_with_a_decay_per_key(name, erase, launched):
    if name == "g" and not erase:
        pytest.skip("the kernels spoil all keys where the decay of one is not finite")
    arrays = given(140, lengths=[70, 70], keyed=True)
    arrays[name][0, 80, 0] = float("nan")
    arrays[name][0, 135].view(-1)[-1] = float("inf")
    compare(arrays, {}, erase, normalize=erase)
    assert KEYED in launched


@pytest.mark.parametrize(
    ("decay", "reset", "right", "wrong"),
    [
        (0.05, -0.1, "number > 2, whole_2", "number > 3, whole_2"),  # sums since the start leave a block out
        (0.05, -0.1, "whole_2 - opening_2", "whole_2 + opening_2"),
        (0.05, -0.1, "exp2(between * -1.0)", "exp2(between)"),
        (3.0, -0.1, "last + next_one", "last - next_one"),
        (0.05, -0.1, "later, earlier * -1.0", "later, earlier"),
        (0.05, -200.0, "if largest < NEAR", "if largest < 1e9"),
        (0.05, -200.0, "((token >> level >> 1) * 2 + 1) << level", "((token >> level >> 1) * 2) << level"),
    ],
)
def test_a_planted_bug_is_found(decay, reset, right, wrong, launched, monkeypatch):
    read = gluon.inspect.getsource

    def planted(module):
        text = read(module)
        if not module.__name__.endswith("_gluon_keyed_kernels"):
            return text
        assert text.count(right) == 1
        return text.replace(right, wrong)

    monkeypatch.setattr(gluon.inspect, "getsource", planted)
    arrays = given(64, keyed=True, decay=decay)
    arrays["g"][:, 64 // 3] = reset
    with pytest.raises(AssertionError):
        compare(arrays, {})
    assert KEYED in launched


@few(
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
    [({"t": 100, "keyed": True}, {}, True, "dy")],
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
        for plan in ({}, {"hopper_pairs": 0, "hopper_chains": 0, "hopper_prepare": 0})
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


@pytest.mark.parametrize("n", [128, 256])
def test_states_with_many_keys_are_not_cut(n, launched, monkeypatch):
    """The map of a segment with 256 keys is larger than the memory of a multiprocessor."""
    for module in (plans, backward):
        monkeypatch.setattr(module, "device_limits", lambda device: (132, 227 * 1024))
    full = dict.fromkeys(arg.name for arg in plans.SPEC.args) | given(16384, n)
    options = {"normalize": True, "lower_bound": None, "beta_limit": None, "erase": True, "scale": None}
    made = plans.Forward(**full, **options, chunk_size=None)
    back = backward.Backward(full["v"], **full, **options, chunk_size=None, config={})
    assert (made.nsegments > 1, back.nsegments > 1) == (n == 128, n == 128)
