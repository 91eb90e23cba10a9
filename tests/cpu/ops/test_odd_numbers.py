"""Every argument that is no array, of every operator and of the functions of other packages, gets values without a
meaning: each is refused by a typed error that names it."""

import math
from decimal import Decimal
from fractions import Fraction
from numbers import Real

import numpy as np
import pytest
import torch

import refold.ops as ops
from refold.compat import causal_conv1d as conv
from refold.compat import mamba_ssm as mamba
from refold.errors import ArgumentError, RefoldError
from refold.ops.spec import all_specs
from refold.ops.testing import problem


class Uncomparable:
    __hash__ = None

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("it cannot be compared")


# No option has one of these, but for those in MAY_BE_NEGATIVE.
ODD = [
    math.nan, -math.inf, -1, -0.5, 10**400, -(10**400), 1j, "1", b"1", [], (), {}, set(), object(), Uncomparable(),
    Decimal(1), torch.tensor(math.nan), torch.tensor([1.0, 2.0]), np.array([1.0, 2.0]), np.float32("nan"), np.int64(-3),
    torch.int32, torch.complex64, torch.float8_e4m3fn, int,
]  # fmt: skip
NEVER = {"eps": [math.inf, None, True, np.float16("inf")], "dt_limit": [math.inf, None, True, 1.0]}
NEVER |= {name: [math.inf, 0, 1.0, True, 2**63, Fraction(4, 2)] for name in ("chunk_size", "group_size")}
NEVER |= {name: [None, 0, 1, 1.0] for name in ("dt_softplus", "norm_before_gate", "reverse", "normalize", "erase")}
LIMITS = [
    (math.inf, math.inf), (-math.inf, -math.inf), (math.nan, 1.0), (0.0, math.nan), (1.0, 0.5), (10**400, math.inf),
    (0.0, "1"), (False, True), (0.0, 1j), (0.0, None), (torch.tensor(0.0), torch.tensor(1.0)),
    np.array([0.0, 1.0]), range(2), "01",
]  # fmt: skip
MAY_BE_NEGATIVE = ("scale", "lower_bound")
SPECS = {spec.name: spec for spec in all_specs()}


@pytest.mark.parametrize("framework", ["numpy", "torch", "gradients"])
@pytest.mark.parametrize("name", SPECS)
def test_operators(name: str, framework: str) -> None:
    spec = SPECS[name]
    case = spec.cases()[0]
    given = problem(spec, case).arrays
    if framework != "numpy":
        given = {k: torch.from_numpy(a).float() for k, a in given.items()}
    if framework == "gradients":
        given = {k: a.requires_grad_(a.is_floating_point()) for k, a in given.items()}
    rest = dict(case.options) | {arg.name: None for arg in spec.args if arg.name not in given}
    for option in spec.options:
        for value in [*ODD, *NEVER.get(option.name, []), *(LIMITS if option.name == "dt_limit" else [])]:
            if option.name in MAY_BE_NEGATIVE and isinstance(value, Real) and -10 < value < 0:
                continue
            with pytest.raises(ArgumentError, match=rf"^{name}: {option.name} must be ") as caught:
                getattr(ops, name)(**given, **{**rest, option.name: value})
            assert isinstance(caught.value, RefoldError)


def test_numbers_of_other_types_are_numbers() -> None:
    x, dt, A, B = torch.rand(1, 4, 2, 3), torch.rand(1, 4, 2), -torch.ones(2), torch.rand(1, 4, 1, 5)
    expected, _ = ops.ssd(x, dt, A, B, B, dt_limit=(0.25, 0.5))
    for limits in ((Fraction(1, 4), 0.5), [np.float32(0.25), np.float64(0.5)]):
        for needed in (False, True):
            assert torch.equal(ops.ssd(x.requires_grad_(needed), dt, A, B, B, dt_limit=limits)[0], expected)
    free, _ = ops.ssd(x, dt, A, B, B, dt_limit=(-math.inf, math.inf))
    assert torch.equal(free, ops.ssd(x, dt, A, B, B, dt_limit=(0, 10))[0])
    assert torch.equal(ops.gated_rmsnorm(x, None, B[0, 0, 0, :3], eps=Fraction(1, 2)),
                       ops.gated_rmsnorm(x, None, B[0, 0, 0, :3], eps=0.5))  # fmt: skip


b, t, d, w, h, p, g, n = 2, 5, 4, 3, 2, 4, 1, 3
SCAN = (torch.rand(b, t, h, p), torch.rand(b, t, h), -torch.ones(h), torch.rand(b, t, g, n), torch.rand(b, t, g, n))
SPLIT = (
    torch.rand(b, t, 2 * h * p + 2 * g * n + h), torch.rand(h * p + 2 * g * n, w), None, torch.rand(h), -torch.ones(h),
    torch.rand(h),
)  # fmt: skip
INNER = (
    torch.rand(b, 2 * d, t), torch.rand(d, 1, w), None, torch.rand(2 + 2 * n, d), torch.rand(d, 2), torch.rand(7, d),
    None, -torch.ones(d, n),
)  # fmt: skip
STEP = (torch.rand(b, d, n), torch.rand(b, d), torch.rand(b, d), -torch.ones(d, n), torch.rand(b, n), torch.rand(b, n))
SIZES = [0, -1, 1.0, math.nan, math.inf, True, "1", 2.5]
SHARES = [-0.1, 1, 1.0, 2.0, math.nan, math.inf, -math.inf, "0", True, None, 1j]
EPS = [-1e-6, math.nan, math.inf, -math.inf, "0", True, None, 1j]
x, weight = torch.rand(b, t, d), torch.rand(d)
slots = torch.tensor([0, 1])
CALLS = {
    ("chunk_scan", "chunk_size"): (lambda v: mamba.mamba_chunk_scan_combined(*SCAN, v), [*SIZES, None]),
    ("chunk_scan", "dt_limit"): (lambda v: mamba.mamba_chunk_scan_combined(*SCAN, 4, dt_limit=v), [*LIMITS, None, 1.0]),
    ("chunk_scan", "state_dtype"): (
        lambda v: mamba.mamba_chunk_scan_combined(*SCAN, 4, state_dtype=v), [torch.int32, "float32", 32, np.float32]
    ),
    ("split", "headdim"): (lambda v: mamba.mamba_split_conv1d_scan_combined(*SPLIT, 4, headdim=v), SIZES),
    ("split", "ngroups"): (
        lambda v: mamba.mamba_split_conv1d_scan_combined(*SPLIT, 4, headdim=p, ngroups=v), [*SIZES, None]
    ),
    ("split", "rmsnorm_eps"): (
        lambda v: mamba.mamba_split_conv1d_scan_combined(
            *SPLIT, 4, headdim=p, rmsnorm_weight=torch.rand(h * p), rmsnorm_eps=v
        ),
        EPS,
    ),
    ("inner", "b_c_dt_rms_eps"): (
        lambda v: mamba.mamba_inner_fn(*INNER, b_rms_weight=torch.rand(n), b_c_dt_rms_eps=v), EPS
    ),
    ("inner", "checkpoint_lvl"): (
        lambda v: mamba.mamba_inner_fn(*INNER, checkpoint_lvl=v), [-1, 2, math.nan, "0", None]
    ),
    ("update", "pad_slot_id"): (
        lambda v: mamba.selective_state_update(*STEP, state_batch_indices=slots, pad_slot_id=v), [math.nan, -1.0, None]
    ),
    ("convolution", "pad_slot_id"): (
        lambda v: conv.causal_conv1d_update(
            x[:, 0], torch.rand(b, d, w), torch.rand(d, w), conv_state_indices=slots, pad_slot_id=v
        ),
        [math.nan, "1"],
    ),
    ("last inputs", "state_len"): (
        lambda v: conv.causal_conv1d_varlen_states(x[0], torch.tensor([0, t]), v), [*SIZES, None]
    ),
    **{
        (kind.__name__, name): (lambda v, kind=kind, name=name: kind(x, weight, None, **{name: v}), values)
        for kind in (mamba.layer_norm_fn, mamba.rms_norm_fn)
        for name, values in {"eps": EPS, "dropout_p": SHARES}.items()
    },
    ("rmsnorm_fn", "eps"): (lambda v: mamba.rmsnorm_fn(x, weight, None, eps=v), EPS),
    ("rmsnorm_fn", "group_size"): (lambda v: mamba.rmsnorm_fn(x, weight, None, group_size=v), SIZES),
    ("RMSNorm", "hidden_size"): (mamba.RMSNorm, [*SIZES, None]),
    ("RMSNorm", "eps"): (lambda v: mamba.RMSNorm(d, v), EPS),
    ("RMSNorm", "dropout_p"): (lambda v: mamba.RMSNorm(d, dropout_p=v), SHARES),
    ("RMSNormGated", "eps"): (lambda v: mamba.RMSNormGated(d, v), EPS),
    ("RMSNormGated", "group_size"): (lambda v: mamba.RMSNormGated(d, group_size=v), SIZES),
}  # fmt: skip


@pytest.mark.parametrize("case", CALLS, ids=" ".join)
def test_functions_of_other_packages(case: tuple[str, str]) -> None:
    call, values = CALLS[case]
    for value in values:
        with pytest.raises(ArgumentError, match=f"{case[1]} must be "):
            call(value)
