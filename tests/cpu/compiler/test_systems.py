"""Systems of coupled carries and running maxima: both ways to compute them give the steps of the loop."""

import pytest
import torch

from refold.compiler.recurrence import systems
from refold.compiler.recurrence.systems import BOUNDED_SCAN, LINEAR_SYSTEM

STEPS = 7
TIES = (0.5, 1.0), (0.5, 1.0)  # as PyTorch's maximum and minimum share a gradient
pytestmark = [pytest.mark.filterwarnings("ignore:invalid value"), pytest.mark.rows(16)]  # of Triton's interpreter


SYSTEMS = [
    (2, (1, 3, 5), False, True, []),
    (2, (STEPS, 3, 5), True, True, []),
    (3, (STEPS, 1, 5), False, False, []),
    (1, (1, 3, 5), True, False, []),
    (2, (1, 1, 1), False, True, []),
    (3, (STEPS, 1, 1), True, False, []),
    (5, (1, 1, 1), False, True, []),
    (1, (1, 1, 1), False, True, [0, 1]),
    (2, (STEPS, 3, 5), True, True, [1]),
    (2, (STEPS, 1, 1), True, False, [0, 2, 1, 2]),
    (1, (1, 3, 5), False, False, [0]),
]


@pytest.fixture(params=["sweeps", "pairs", "gpu"])
def way(request, monkeypatch):
    """Take one step after the other, by Numba or as on a GPU, or compose pairs of them."""
    if request.param == "pairs":
        monkeypatch.setattr(systems, "_sweeps", lambda x: None)
    elif request.param == "gpu":
        from refold.ops.torch.launch import INTERPRETED

        if not INTERPRETED:
            pytest.skip("Triton does not run on the CPU")
        sweeps = systems._imported("sweeps_gpu")
        monkeypatch.setattr(systems, "_sweeps", lambda x: sweeps)
    else:
        pytest.importorskip("numba")


def stepwise(A, b, initial, reverse, copies):
    h, out = initial, [None] * STEPS
    for t in range(STEPS)[:: -1 if reverse else 1]:
        matrix = A[:, :, t if A.shape[2] > 1 else 0]
        out[t] = b[:, t] if h is None else (matrix * h).sum(1) + b[:, t]
        kept = [torch.zeros_like(b[0, t]) if h is None else h[copied] for copied in copies]
        h = torch.cat([out[t], torch.stack(kept)]) if kept else out[t]
    return torch.stack(out, 1)


@pytest.mark.parametrize("given", SYSTEMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.complex128])
def test_systems_and_their_gradients(way, dtype, given):
    size, matrices, reverse, begins, copies = given
    generator = torch.Generator().manual_seed(0)
    every = size + len(copies)
    shapes = [(size, every, *matrices), (size, STEPS, 3, 5), (every, 3, 5)][: 2 + begins]
    leaves = [(torch.randn(s, generator=generator, dtype=dtype) / 2).requires_grad_() for s in shapes]
    operands = [*leaves, *[None] * (1 - begins), reverse, copies]
    y, expected = LINEAR_SYSTEM(*operands), stepwise(*operands)
    weights = torch.randn(y.shape, generator=generator, dtype=dtype)
    torch.testing.assert_close(y, expected)
    got = torch.autograd.grad(y, leaves, weights)
    for a, b in zip(got, torch.autograd.grad(expected, leaves, weights), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_sixteen_bits_are_rounded_once(way):
    A, b, start = torch.full((1, 1, 1, 4), 0.999), torch.ones(1, STEPS, 4), torch.zeros(1, 4)
    narrow = [x.half() for x in (A, b, start)]
    expected = stepwise(*(x.double() for x in narrow), False, []).half()
    assert torch.equal(LINEAR_SYSTEM(*narrow, False, []), expected)


def test_a_state_that_is_not_there_is_not_read(way):
    """Zero times infinity would be NaN."""
    A, b = torch.full((1, 1, 1, 2), float("inf")), torch.ones(1, STEPS, 2)
    assert LINEAR_SYSTEM(A, b, None, False, [])[0, 0].isfinite().all()


OPERANDS = ("scale", "shift", "low", "high")


def bounded(scale, shift, low, high, h, above=torch.maximum):
    """Take the steps of a bounded scan one after the other."""
    out = []
    operands = ([None] * STEPS if x is None else x.expand(STEPS, -1) for x in (scale, shift, low, high))
    for a, b, least, most in zip(*operands, strict=True):
        h = above((h if a is None else a * h) + b, least)
        h = h if most is None else torch.minimum(h, most)
        out.append(h)
    return torch.stack(out)


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("steady", ["shift", "floor"])
def test_one_shift_or_floor_for_all_steps(way, smooth, steady):
    """The result and the gradients are those of as many copies."""
    generator = torch.Generator().manual_seed(0)
    shift, floor, start = (torch.randn(n, 300, generator=generator, dtype=torch.float64) for n in (STEPS, STEPS, 1))
    one = {"shift": shift, "floor": floor}[steady][:1].clone()
    results = []
    for whole in (False, True):
        operand = one.clone().requires_grad_()
        copies = operand.expand(STEPS, -1) if whole else operand
        pair = (copies, floor) if steady == "shift" else (shift, copies)
        h = BOUNDED_SCAN(None, *pair, None, start[0], smooth, *TIES)
        assert h.shape == (STEPS, 300)
        results.append((h, *torch.autograd.grad(h.sin().sum(), operand)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("steady", ["", "scale", "shift", "low", "high"])
@pytest.mark.parametrize("missing", ["", "scale", "high"])
def test_bounded_scans_and_their_gradients(way, steady, missing):
    """Factors of both signs, bounds that cross, and ties; each with one value for all steps, too."""
    generator = torch.Generator().manual_seed(0)
    given = {name: torch.randn(STEPS, 300, generator=generator, dtype=torch.float64) for name in OPERANDS}
    for name in ("shift", "low", "high"):
        given[name] = given[name].round() + (name == "high")
    given["scale"] = given["scale"].sign() * 2.0 ** given["scale"].round().clamp(max=0)
    start = given["shift"][0].clone()
    given = {name: x[:1].clone() if name == steady else x for name, x in given.items()}
    operands = [None if name == missing else given[name].requires_grad_() for name in OPERANDS]
    leaves = [x for x in (*operands, start.requires_grad_()) if x is not None]
    expected, found = bounded(*operands, start), BOUNDED_SCAN(*operands, start, False, *TIES)
    torch.testing.assert_close(found, expected)
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    for ours, theirs in zip(*(torch.autograd.grad(y, leaves, weights) for y in (found, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_second_derivatives_within_bounds(way):
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(STEPS, 2, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3)]
    start = torch.zeros(2, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(lambda *xs: BOUNDED_SCAN(*xs, None, start, False, *TIES), given)


def test_bounds_keep_what_is_not_finite(way):
    generator = torch.Generator().manual_seed(0)
    operands = [torch.randn(STEPS, 300, generator=generator, dtype=torch.float64) for _ in OPERANDS]
    for i, x in enumerate(operands):
        for lane, bad in enumerate((float("nan"), float("inf"), -float("inf"))):
            x[2, 3 * i + lane] = bad
    start = torch.zeros(300, dtype=torch.float64)
    found = BOUNDED_SCAN(*operands, start, False, *TIES)
    torch.testing.assert_close(found, bounded(*operands, start), equal_nan=True)


@pytest.mark.parametrize("smooth", [False, True])
def test_maxima_keep_what_is_not_finite(way, smooth):
    above = torch.logaddexp if smooth else torch.maximum
    generator = torch.Generator().manual_seed(0)
    shift, floor = (torch.randn(STEPS, 300, generator=generator, dtype=torch.float64) for _ in range(2))
    floor[2, 0], floor[3, 1], shift[2, 2], floor[:3, 3] = float("nan"), float("inf"), float("nan"), -float("inf")
    start = torch.full((300,), -float("inf"), dtype=torch.float64)
    found = BOUNDED_SCAN(None, shift, floor, None, start, smooth, *TIES)
    torch.testing.assert_close(found, bounded(None, shift, floor, None, start, above), equal_nan=True)


RULES = {
    "maximum": (torch.maximum, False, (0.5, 1.0)),
    "clamp": (lambda x, low: torch.clamp(x, min=low), False, (1.0, 0.0)),
    "relu": (lambda x, low: torch.relu(x - low) + low, False, (0.0, 1.0)),
    "logaddexp": (torch.logaddexp, True, (0.5, 1.0)),
}


@pytest.mark.parametrize("rule", RULES)
def test_gradients_of_steps_before_what_is_not_finite(way, rule):
    """They are those of PyTorch, which differ where an operand is not a number."""
    above, smooth, shares = RULES[rule]
    generator = torch.Generator().manual_seed(0)
    shift, low = (torch.randn(n, 300, generator=generator, dtype=torch.float64) for n in (STEPS, 1))
    low[:, :100] = 0.0
    shift[4, :3] = shift[4, 200:203] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    weights = torch.randn(shift.shape, generator=generator, dtype=torch.float64)
    shift.requires_grad_()
    start = torch.zeros(300, dtype=torch.float64)
    found = BOUNDED_SCAN(None, shift, low, None, start, smooth, shares, shares)
    expected = bounded(None, shift, low, None, start, above)
    ours, theirs = (torch.autograd.grad(y, shift, weights)[0][:4] for y in (found, expected))
    torch.testing.assert_close(ours, theirs, equal_nan=True)


def test_a_call_takes_few_operations_of_pytorch():
    """A short scan takes as long as what is done around it."""
    pytest.importorskip("numba")
    A, b = torch.rand(2, 2, 1, 4, 8), torch.rand(2, STEPS, 4, 8)
    for profiled in (False, True):
        with torch.no_grad(), torch.autograd.profiler.profile(enabled=profiled) as profile:
            LINEAR_SYSTEM(A, b, b[:, 0], False, [])
            BOUNDED_SCAN(None, b[0], b[1], None, b[0, 0], False, *TIES)
    assert sum(event.name.startswith("aten::") for event in profile.function_events) < 85
