"""The Hopper kernels of the ssd forward, interpreted: groups of one head and of several, steps of any sign."""

import os
from importlib import import_module

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run by test_triton_interpreted, in a process of its own", allow_module_level=True)

import refold.ops  # noqa: E402
from refold.ops.ssd.tables import FORWARD  # noqa: E402
from support import gluon  # noqa: E402

KERNELS = "refold.ops.ssd._gluon_kernels"
plans, kernels = import_module("refold.ops.ssd._triton_forward"), import_module("refold.ops.ssd._triton_kernels")
INF = float("inf")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
    pytest.mark.rows(6),
]  # of zeros, by NumPy


@pytest.fixture
def launched(monkeypatch):
    """Plan as for an H200, run kernels in Gluon with torch, and list what runs."""
    names = gluon.launched(monkeypatch, KERNELS)
    monkeypatch.setattr(plans, "lookup", lambda *_: FORWARD.default | FORWARD.families["hopper"])
    monkeypatch.setattr(plans, "_hopper_fits", lambda x, *others: plans._fits_copy_engine(x, *others))
    monkeypatch.setattr(kernels, "let_next_start", lambda: None)
    return names


def given(b, t, h, p, g, n, signs=False, more=False):
    """Return arrays and options of a call."""
    torch.manual_seed(0)
    half = {"dtype": torch.bfloat16}
    arrays = {
        "x": torch.randn(b, t, h, p, **half), "dt": torch.rand(b, t, h), "A": -0.5 - torch.rand(h),
        "B": torch.randn(b, t, g, n, **half), "C": torch.randn(b, t, g, n, **half) / n**0.5,
    }  # fmt: skip
    options = {}
    if signs:  # growth, and a decay of zero, with which nothing comes
        arrays["dt"] = torch.randn(b, t, h) / 4
        arrays["dt"][:, 41], arrays["x"][:, 41] = 300.0, 0.0
        arrays["dt"][:, 5::23] = 0.0
        options["dt_limit"] = (-INF, INF)
    if more:
        arrays |= {"D": torch.randn(h), "z": torch.randn(b, t, h, p, **half), "initial_state": torch.randn(b, h, p, n)}
    return arrays, options


def compare(arrays, options, config):
    """Compare a plan's results with those of float64; what is not finite must not be finite there."""
    names = [arg.name for arg in plans.SPEC.args]
    plan = plans.ssd.make(
        **dict.fromkeys(names) | arrays, dt_softplus=False, dt_limit=options.get("dt_limit", (0.0, INF)),
        chunk_size=None, state_dtype=None, config=config,
    )  # fmt: skip
    found = plan(*(arrays.get(name) for name in names))
    wide = {name: a.double() for name, a in arrays.items()}
    for got, want in zip(found, refold.ops.ssd(**wide, **options, backend="torch"), strict=True):
        assert torch.equal(got.isfinite(), want.isfinite())
        keep = want.isfinite()
        assert (got.double() - want)[keep].norm() <= 0.01 * want[keep].norm()


SHAPES = {
    "group_a_head": (1, 200, 2, 64, 2, 64),
    "group_a_head_wide": (1, 130, 1, 40, 1, 120),
    "one_group": (1, 150, 2, 64, 1, 64),
    "halves": (1, 100, 1, 64, 1, 200),
}


@pytest.mark.parametrize("signs", [False, True], ids=["positive", "signs"])
@pytest.mark.parametrize("shape", SHAPES)
def test_values(shape, signs, launched):
    config = {"segments": 2} if signs else {"segments": 1, "hopper_stages": 3}
    compare(*given(*SHAPES[shape], signs=signs, more=signs), config)
    assert "_ssd_fwd_scan_hopper_kernel" in launched
    assert ("_ssd_fwd_state_hopper_kernel" in launched) == signs


@pytest.mark.parametrize("shape", ["group_a_head", "one_group"])
@pytest.mark.parametrize("name", ["x", "dt", "B", "C"])
def test_what_is_not_finite_stays_in_its_place(name, shape, launched):
    arrays, options = given(*SHAPES[shape], signs=True)
    arrays["A"], arrays["dt"] = -arrays["A"], -arrays["dt"]
    arrays[name][0, 70, -1] = float("nan")
    arrays["dt"][0, 131, 0] = -INF  # a decay of zero, with which something infinite comes
    compare(arrays, options, {"segments": 2})
