"""The numerical check accepts right candidates, and refuses subtly wrong ones."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refold.verify import check, numerics


def matmul(a, b):
    return a @ b


def reference(a, b):
    return a.double() @ b.double()


def judge(candidate, n=64, dtype=torch.float32, actual=None):
    like = [torch.randn(32, n, dtype=dtype), torch.randn(n, 24, dtype=dtype)]
    return check(matmul, candidate, reference, actual or like, like, terms=n, multilinear=True)


HONEST = {
    "same": matmul,
    "other_order": lambda a, b: (a.flip(1)) @ b.flip(0),
    "multiply_and_sum": lambda a, b: (a[:, :, None] * b[None]).sum(1),
    "sequential": lambda a, b: sum(a[:, k : k + 1] * b[k : k + 1] for k in range(a.shape[1])),
    "split": lambda a, b: a[:, ::2] @ b[::2] + a[:, 1::2] @ b[1::2],
}

WRONG = {
    "zeros": lambda a, b: torch.zeros(32, 24),
    "half_precision": lambda a, b: (a.half() @ b.half()).float(),
    "bfloat16": lambda a, b: (a.bfloat16() @ b.bfloat16()).float(),
    "scaled": lambda a, b: (a @ b) * (1 + 1e-5),
    "one_element": lambda a, b: (a @ b).index_put((torch.tensor([3]), torch.tensor([5])), torch.tensor(0.0)),
    "a_term_dropped": lambda a, b: a[:, 1:] @ b[1:],
    "transposed_blocks": lambda a, b: (a @ b).roll(1, 0),
    "absolute": lambda a, b: a.abs() @ b.abs(),
    "nan": lambda a, b: (a @ b) * float("nan"),
}


@pytest.mark.parametrize("name", HONEST)
@pytest.mark.parametrize("n", [8, 64, 1024])
def test_honest_reorderings_pass(name, n):
    evidence = judge(HONEST[name], n)
    assert evidence.passed, evidence.reason


@pytest.mark.parametrize("name", WRONG)
def test_wrong_candidates_are_refused_with_a_reason(name):
    evidence = judge(WRONG[name])
    assert not evidence.passed
    assert "inputs:" in evidence.reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_originals_allow_their_own_rounding(dtype):
    assert judge(HONEST["split"], dtype=dtype).passed
    assert not judge(lambda a, b: (a @ b) * 1.1, dtype=dtype).passed


def test_changing_an_input_is_refused():
    evidence = judge(lambda a, b: a.mul_(2) @ b * 0.5)
    assert evidence.failure.startswith("changed its inputs")


def test_returning_an_input_is_refused():
    like = [torch.randn(4, 4)]
    evidence = check(lambda x: x.clone(), lambda x: x, lambda x: x.double(), like, like, terms=1, multilinear=True)
    assert "shares memory" in evidence.failure


@pytest.mark.parametrize(
    ("candidate", "what"),
    [(lambda a, b: (a @ b)[:1], "shape"), (lambda a, b: (a @ b).double(), "dtype")],
)
def test_other_metadata_is_refused(candidate, what):
    assert f"has {what}" in judge(candidate).failure


def test_wrong_only_on_the_users_data_is_found():
    large = [torch.full((32, 64), 1e4), torch.randn(64, 24)]
    evidence = judge(lambda a, b: a.clamp(-100, 100) @ b, actual=large)
    assert "actual inputs" in evidence.reason
    assert "normal inputs" not in evidence.reason


def in_float64(program, candidate, *inputs):
    """Judge a float64 candidate against a program that computes in the dtype it is given."""
    return check(
        program,
        candidate,
        lambda *xs: program(*(x.double() for x in xs)),
        None,
        inputs,
        terms=1,
        multilinear=False,
        narrowed=lambda *xs: program(*(x.float() for x in xs)),
    )


def cancelling(by):
    """Return a program that loses log2(by) bits, and one that loses as many others."""
    return lambda x: (x + by) - by, lambda x: (x - by) + by


@pytest.mark.parametrize("by", [1.0, 30.0, 1000.0])
def test_float64_originals_allow_their_own_rounding(by):
    original, honest = cancelling(by)
    x = torch.randn(1000, dtype=torch.float64)
    evidence = in_float64(original, honest, x)
    assert evidence.passed, evidence.reason
    # What is known of the original is what its own error is: that against exact sums, which are x.
    error = float((original(x) - x).norm() / x.norm())
    assert error / 4 < evidence.kinds[0].original_error < 4 * error
    for wrong in (1e-10, -4e-12):
        assert not in_float64(original, lambda x, wrong=wrong: original(x) * (1 + wrong), x).passed


def flips(x):
    """A comparison that float32 decides otherwise."""
    return torch.where(x + 1e8 > 1e8, x, -x)


def overflows(x):
    return (x * 1e30) * (x * 1e30) * 1e-60


@pytest.mark.parametrize("original", [cancelling(1e5)[0], flips, overflows], ids=["ill_posed", "flips", "overflows"])
def test_float32_runs_that_say_nothing_allow_nothing(original):
    x = torch.randn(1000, dtype=torch.float64)
    assert in_float64(original, lambda x: original(x) * 1.0, x).passed
    evidence = in_float64(original, lambda x: original(x) * (1 + 1e-14), x)
    assert not evidence.passed
    assert evidence.kinds[0].original_error == 0.0


def resets(g, x):
    """A scan whose decays are exponentials: minus infinity forgets."""
    state, out = torch.zeros_like(x[0]), []
    for gate, value in zip(g, x, strict=True):
        state = state * (-gate.abs()).exp() + value
        out.append(state)
    return torch.stack(out)


def by_differences(where):
    """The same as one masked product; ``where`` the mask is applied matters only for infinities."""

    def scan(g, x):
        sums = (-g.abs()).cumsum(0)
        later = torch.ones(len(g), len(g), dtype=torch.bool).tril()[..., None]
        if where == "after":
            weights = (sums[:, None] - sums[None]).exp() * later
        else:
            weights = torch.stack([torch.stack([(-g[j + 1 : i + 1].abs()).sum(0) for j in range(len(g))])
                                   for i in range(len(g))]).exp()  # fmt: skip
            weights = torch.where(later, weights, 0)
        if where == "products":
            return (weights * torch.where(later, x[None], 0)).sum(1)
        return (weights * x[None]).sum(1)

    return scan


@pytest.mark.parametrize("multilinear", [False, True])
def test_random_inputs_of_a_nonlinear_program_keep_the_signs_of_the_real_ones(multilinear):
    seen = []
    actual = [-torch.rand(4, 8), torch.rand(4, 8).relu(), torch.randn(4, 8), torch.zeros(4, 8)]

    def program(*xs):
        return sum(x.double() for x in xs).float()

    def candidate(*xs):
        seen.append(xs)
        return program(*xs)

    check(program, candidate, program, actual, actual, terms=4, multilinear=multilinear)
    normal = seen[1]
    signs = [(bool((x > 0).any()), bool((x < 0).any())) for x in normal]
    both = (True, True)
    assert signs == ([both] * 4 if multilinear else [(False, True), (True, False), both, both])


@pytest.mark.parametrize(("where", "kept"), [("after", False), ("weights", False), ("products", True)])
def test_a_candidate_must_be_finite_where_the_original_is(where, kept):
    like = [torch.randn(12, 4), torch.randn(12, 4)]
    reference = lambda *xs: resets(*(x.double() for x in xs))  # noqa: E731
    evidence = check(resets, by_differences(where), reference, like, like, terms=12, multilinear=False)
    assert evidence.passed == kept
    if not kept:
        assert "not finite where the original's are" in evidence.reason
        assert "infinities inputs" in evidence.reason


@pytest.mark.parametrize("against", [False, True])
@pytest.mark.parametrize(("where", "kept"), [("after", True), ("before", False)])
def test_gradients_are_finite_before_the_first_infinity(where, kept, against):
    """After it, a zero that is a factor of the state makes a NaN where another form of the program has a number."""

    def sums(x, backwards):
        return x.flip(1).cumsum(1).flip(1) if backwards else x.cumsum(1)

    def program(spoilt):
        def run(x):
            state = sums(x, against != (spoilt == "before"))
            return sums(x, against), torch.ones_like(x) + (0 * state if spoilt else 0)

        return run

    like = [torch.randn(1, 24, 2)]
    evidence = check(
        program(""), program(where), lambda x: program("")(x.double()), like, like, terms=24, multilinear=False,
        differentiated=(True,), seed=1,
    )  # fmt: skip
    assert evidence.passed == kept, evidence.reason


def test_no_farther_has_a_meaning_where_the_reference_is_zero():
    r, moved = torch.zeros(5, dtype=torch.float64), [torch.full((5,), 1e-6), torch.zeros(5)]
    assert numerics.no_farther(r, torch.full((5,), 3e-6), moved)
    for wrong in (torch.full((5,), 1e-5), torch.tensor([0.0, 0, 0, 0, 9e-6]), torch.full((5,), math.nan)):
        assert not numerics.no_farther(r, wrong, moved)
    assert not numerics.no_farther(r, torch.zeros(5), [])
    assert not numerics.no_farther(r, torch.ones(5), [torch.full((5,), math.nan)])


class _SpoiltGradient(torch.autograd.Function):
    """A copy, whose gradient is not a number at one position where the other argument is infinite anywhere."""

    @staticmethod
    def forward(ctx, x, y, at):
        ctx.at, ctx.bad = at, not bool(y.isfinite().all())
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        if ctx.bad:
            grad[ctx.at] = float("nan")
        return grad, None, None


@pytest.mark.parametrize(
    ("at", "coupled", "kept"), [(11, 1, True), (0, 1, True), (10, 1, False), (10, 2, True), (5, 4, False)]
)
def test_gradients_may_be_lost_at_the_ends_alone(at, coupled, kept):
    """There the original has the gradient of a state that nothing reads, and a scan multiplies by that zero."""

    def gradients(spoilt):
        def run(x, y):
            x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
            out = (_SpoiltGradient.apply(x, y.detach(), at) if spoilt else x) * 2 + y
            return out.detach(), *torch.autograd.grad(out.sum(), (x, y))

        return run

    def reference(x, y):
        return gradients(False)(x.double(), y.double())

    like = [torch.randn(12, 4), torch.randn(12, 4)]
    evidence = check(
        gradients(False), gradients(True), reference, like, like, terms=2, multilinear=False,
        differentiated=(True, True), coupled=coupled,
    )  # fmt: skip
    assert evidence.passed == kept
    assert kept or "not finite where the original's are" in evidence.reason


@pytest.mark.parametrize("mask", [-1e5, -1e9, 1e30])
def test_small_elements_beside_large_ones_are_parts_of_their_own(mask):
    scores = torch.randn(64, 64, dtype=torch.float64)
    r = torch.where(torch.ones(64, 64).triu(1) > 0, mask, scores)
    (part,) = numerics.small_parts(r)
    assert torch.equal(part, r != mask)
    half = torch.where(part, scores.half().float(), mask)
    assert numerics.compare("", r, r.float(), half, None, 64, parts=False).passed
    assert "small next to others" in numerics.compare("", r, r.float(), half, None, 64).reason
    assert numerics.compare("", r, r.float(), r.float() * (1 + 2**-23), None, 64).passed
    assert not numerics.no_farther(r, half, [r.float()], parts=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_wrong_channel_that_is_small_is_found(dtype):
    size = torch.tensor([1.0, 1e-6, 1.0, 1.0], dtype=dtype)
    channels = lambda x: x.exp() * size.to(x.dtype)  # noqa: E731
    x = torch.randn(64, 4, dtype=dtype)
    off = torch.finfo(dtype).eps * 256 * torch.tensor([0.0, 1.0, 0.0, 0.0])
    assert in_float64(channels, lambda x: (x + 0.0).exp() * size, x).passed
    assert "small next to others" in in_float64(channels, lambda x: channels(x) * (1 + off.to(dtype)), x).reason


def test_a_small_channel_may_be_as_inexact_as_the_original_is_next_to_its_inputs():
    """A difference of equal numbers that the original finds exactly, by luck."""
    a = torch.randn(64, 1)
    x = torch.cat([a, (a.double() * (1 + 1e-5)).float(), 1e3 * torch.randn(64, 1)], 1)
    difference = lambda x: torch.stack([x[:, 1] - x[:, 0], x[:, 2].sin() * 1e3], 1)  # noqa: E731
    other = lambda x: torch.stack([(x[:, 1] * 0.9 - x[:, 0] * 0.9) / 0.9, x[:, 2].sin() * 1e3], 1)  # noqa: E731
    reference = lambda x: difference(x.double())  # noqa: E731
    evidence = check(difference, other, reference, [x], [x], terms=1, multilinear=False)
    assert evidence.passed, evidence.reason
    wrong = lambda x: difference(x) * (1 + torch.tensor([0.1, 0.0]))  # noqa: E731
    assert not check(difference, wrong, reference, [x], [x], terms=1, multilinear=False).passed


def test_what_sums_leave_below_the_normal_numbers_is_equal():
    """What a state forgot in one order of its products may be a few of the least numbers in another."""
    forgotten = torch.arange(64) < 32
    r = torch.where(forgotten, 1e-50, torch.ones(64, dtype=torch.float64))
    least = torch.finfo(torch.float32).smallest_normal * torch.finfo(torch.float32).eps
    for size, passes in ((40 * least, True), (1e-38, False)):
        y = torch.where(forgotten, size, 1.0)
        assert numerics.compare("", r, r.float(), y, None, 16).passed is passes


def test_powers_have_parts_within_parts():
    r = torch.randn(32, 1, dtype=torch.float64) * 10.0 ** -torch.arange(16)
    sizes = [int(part.sum()) for part in numerics.small_parts(r)]
    assert len(sizes) > 1
    assert sizes == sorted(sizes, reverse=True)


def test_parts_end_where_squares_are_zero_or_infinite():
    r = 10.0 ** -torch.arange(0, 320, 5, dtype=torch.float64)[:, None].expand(64, 4)
    for values in (r, r[40:], 1e300 * r[:40], 1e300 * r):
        sizes = [int(part.sum()) for part in numerics.small_parts(values)]
        assert sizes == sorted(set(sizes), reverse=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("odd", [(math.inf, -math.inf), (math.inf,), (-math.inf,), (math.nan,), ()])
def test_only_what_is_not_finite_in_the_original_is_left_out(dtype, odd):
    """Also where infinities cancel in a sum, and where a sum of finite numbers is none."""
    r = torch.full((64,), torch.finfo(dtype).max, dtype=torch.float64)
    r[: len(odd)] = torch.tensor(odd, dtype=torch.float64)
    o = r.to(dtype)
    y = torch.where(o.isfinite(), o, 1.0)
    assert numerics.compare("", r, o, y, None, 1).passed
    for wrong in (0.0, math.inf, math.nan):
        assert not numerics.compare("", r, o, y.index_fill(0, torch.tensor([3]), wrong), None, 1).passed
    lost = numerics.compare("", o.double().nan_to_num(1.0, 1.0, 1.0), y, o, None, 1)
    assert lost.passed is not bool(odd)


@given(st.integers(0, 10**6), st.sampled_from([(4096,), (64, 64), (1,), (0,)]))
def test_numbers_of_one_size_have_no_parts(seed, shape):
    """Zeros, infinities, and the few that happen to be small are none."""
    r = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).relu()
    r.view(-1)[:1] = math.inf
    assert not list(numerics.small_parts(r))


def test_a_candidate_in_16_bits_is_asked_for_what_one_rounding_of_inputs_leaves():
    """Where terms cancel, a product in 16 bits loses what a sum in float32 keeps; but a wrong product is refused."""

    def original(x, d, y):
        return (x.to(like(x)) * d.to(like(x)) - y.to(like(x))).to(x.dtype)

    def like(x):
        return torch.promote_types(x.dtype, torch.float32)

    def narrow(x, d, y):
        return x * d - y

    def judged(candidate, rounds_more):
        x, d = (torch.randn(4096, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (1, 2))
        y = x * d
        y[::64] = 0.0
        actual = [x, d, y]
        exact = [lambda *xs: original(*(v.double() for v in xs))]
        found = check(original, candidate, *exact, actual, actual, terms=2, multilinear=False, rounds_more=rounds_more)
        return found.reason

    assert "actual" in judged(narrow, False)
    assert judged(narrow, True) == ""
    assert "exceeds" in judged(lambda x, d, y: narrow(x, d, y) * 1.25, True)
    assert "exceeds" in judged(lambda x, d, y: narrow(x, 1.125 * d, y), True)
