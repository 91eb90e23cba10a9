"""Contractions are found in every spelling, and nothing else is changed."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck

from support import programs

pytestmark = pytest.mark.rows(16)

B, I, J, K = 3, 5, 6, 7  # all distinct, so that a mixed-up axis cannot go unnoticed

# Every function computes out[b, i, j] = sum over k of x[b, i, k] y[b, j, k], up to layout.
SPELLINGS = {
    "none_index": lambda x, y: (x[:, :, None, :] * y[:, None, :, :]).sum(-1),
    "positional_dim": lambda x, y: (x.unsqueeze(2) * y.unsqueeze(1)).sum(3),
    "keyword_dim": lambda x, y: torch.sum(x.unsqueeze(2) * y.unsqueeze(1), dim=-1),
    "keepdim": lambda x, y: (x.unsqueeze(2) * y.unsqueeze(1)).sum(-1, keepdim=True).squeeze(-1),
    "mul_function": lambda x, y: torch.mul(y.unsqueeze(1), x.unsqueeze(2)).sum(-1),
    "expand": lambda x, y: (x[:, :, None].expand(B, I, J, K) * y[:, None].expand(B, I, J, K)).sum(-1),
    "repeat": lambda x, y: (x[:, :, None].repeat(1, 1, J, 1) * y[:, None]).sum(-1),
    "repeat_interleave": lambda x, y: (x.repeat_interleave(J, dim=1).reshape(B, I, J, K) * y[:, None]).sum(-1),
    "permuted": lambda x, y: (x.permute(2, 0, 1)[:, :, :, None] * y.permute(2, 0, 1)[:, :, None]).sum(0),
    "transposed_output": lambda x, y: (x[:, None] * y[:, :, None]).sum(-1).transpose(1, 2),
    "reduced_axis_first": lambda x, y: (x.mT[:, :, :, None] * y.mT[:, :, None, :]).sum(1),
    "split_reduction": lambda x, y: (x[..., :6].reshape(B, I, 1, 2, 3) * y[..., :6].reshape(B, 1, J, 2, 3)).sum(
        (-1, -2)
    ),
    "two_sums": lambda x, y: (x[..., :6].reshape(B, I, 1, 2, 3) * y[..., :6].reshape(B, 1, J, 2, 3)).sum(-1).sum(-1),
    "merged_batch": lambda x, y: (x[:, :, None] * y[:, None]).reshape(B * I, J, K).sum(-1).reshape(B, I, J),
    "scaled": lambda x, y: (x[:, :, None] * 0.5 * -y[:, None]).sum(-1) * -2.0,
    "mean": lambda x, y: (x[:, :, None] * y[:, None]).mean(-1) * K,
    "contiguous": lambda x, y: (x[:, :, None].expand(B, I, J, K).contiguous() * y[:, None]).sum(-1),
}


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("dynamic", [None, True])
def test_every_spelling_becomes_a_matmul(rewritten, name, dynamic):
    x, y = torch.randn(B, I, K), torch.randn(B, J, K)
    outcome = rewritten(SPELLINGS[name], x, y, dynamic=dynamic)
    assert "recover contraction" in outcome.names
    assert any("bmm" in target for target in outcome.targets)
    assert not any("aten.sum" in target or "aten.mean" in target for target in outcome.targets)
    # 8 + sqrt(K)/2 roundings: the floor of the numerics rule.
    assert outcome.worst() <= (8 + K**0.5 / 2) * 2.0**-24


def test_several_reduced_axes(rewritten):
    x, y = torch.randn(4, 5, 6, 7), torch.randn(8, 5, 7)
    outcome = rewritten(lambda x, y: (x[:, None] * y[None, :, :, None]).sum((2, 4)), x, y)
    assert outcome.names == ["recover contraction"]
    assert outcome.worst() < 1e-6


def test_three_factors_are_ordered_by_cost(rewritten):
    def outer(a, b, c):  # (a b) c: the product of all three is 8 x 9 x 30 x 40
        return (a[:, None, :, None] * b[None, :, :, None] * c[None, None]).sum((2, 3))

    outcome = rewritten(outer, torch.randn(8, 30), torch.randn(9, 30), torch.randn(30, 40))
    assert outcome.names == ["recover contraction"]
    assert outcome.rewrites[0].after.flops < outcome.rewrites[0].before.flops / 10
    assert outcome.worst() < 1e-6


@pytest.mark.parametrize("groups", [1, 2])
def test_the_repeat_of_a_group_to_its_heads_vanishes(rewritten, groups):
    heads, t, n = 8, 5, 7
    C, Bg = torch.randn(2, t, groups, n), torch.randn(2, t, groups, n)

    def scores(C, Bg):
        C, Bg = (v.repeat_interleave(heads // groups, dim=2) for v in (C, Bg))
        return (C[:, :, None] * Bg[:, None]).sum(-1)

    outcome = rewritten(scores, C, Bg)
    (rewrite,) = outcome.rewrites
    assert f"repeat of {heads // groups} dropped" in rewrite.detail
    assert rewrite.after.flops == 2 * 2 * groups * t * t * n
    assert outcome.worst() < 1e-6


def test_repeats_are_seen_through_padding_slicing_and_unary_operations(rewritten):
    def scores(C, Bg):
        C = torch.nn.functional.pad(C.repeat_interleave(6, dim=2), (0, 0, 0, 0, 0, 3)).neg().exp()
        Bg = torch.nn.functional.pad(Bg.repeat_interleave(6, dim=2), (0, 0, 0, 0, 0, 3))[:, 1:]
        return (C[:, :, None] * Bg[:, None]).sum(-1)

    outcome = rewritten(scores, torch.randn(2, 5, 1, 7), torch.randn(2, 5, 1, 7))
    assert "repeat of 6 dropped" in outcome.rewrites[0].detail
    assert outcome.worst() < 1e-6


def test_einsum_with_repeated_operands_is_redone_on_the_group(rewritten):
    def scores(C, Bg):
        C, Bg = (v.repeat_interleave(6, dim=2) for v in (C, Bg))
        return torch.einsum("bthn,bshn->bhts", C, Bg)

    outcome = rewritten(scores, torch.randn(2, 5, 1, 7), torch.randn(2, 5, 1, 7))
    assert outcome.names == ["drop repeat from product"]
    assert outcome.rewrites[0].after.flops * 6 == outcome.rewrites[0].before.flops
    assert outcome.worst() < 1e-6


def test_einsum_without_repeats_stays(rewritten):
    outcome = rewritten(lambda x, y: torch.einsum("bik,bjk->bij", x, y), torch.randn(2, 5, 7), torch.randn(2, 6, 7))
    assert outcome.names == []


MEANS = {
    "of_repeated_sums": (lambda x: x.sum(-1).repeat_interleave(4, dim=1).mean(1), [(2, 3, 16)]),
    "of_repeated_dot_products": (lambda q, k: (q * k).sum(-1).repeat_interleave(4, dim=1).mean(1), [(2, 3, 16)] * 2),
}


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_divides_by_its_own_length_only(rewritten, name):
    fn, shapes = MEANS[name]
    outcome = rewritten(fn, *(torch.randn(shape) for shape in shapes))
    assert "recover contraction" in outcome.names
    assert outcome.worst() < 1e-6


@pytest.mark.parametrize("weighted", [False, True])
def test_a_slice_to_size_one_can_be_repeated(rewritten, weighted):
    def fn(x, w):
        y = x[:, None].expand(-1, 8, -1)[:, :, :1].expand(-1, -1, 5)
        return (y * w).sum(-1) if weighted else y.sum(-1)

    outcome = rewritten(fn, torch.randn(4, 6), torch.randn(5))
    assert outcome.names
    assert outcome.worst() < 1e-6


def test_the_same_tensor_twice_is_not_its_diagonal(rewritten):
    outcome = rewritten(lambda x: (x[:, None, :] * x[None, :, :]).sum(-1), torch.randn(6, 6))
    assert outcome.names == ["recover contraction"]
    assert outcome.worst() < 1e-6


def test_degenerate_sums_disappear_without_aliasing(rewritten):
    outcome = rewritten(lambda x: x.sum(-1), torch.randn(5, 1))
    assert outcome.names == ["drop degenerate sum"]
    assert outcome.worst() == 0


def test_degenerate_sums_lie_in_memory_as_sums_do():
    """A product has other strides along axes of one element when it is run than when it is traced."""

    def fn(x):
        total = (x.view(2, 1, 1, 1) * x.t())[0].diagonal().sum(1, keepdim=True)
        return ((total.view(2, 1, 1, 1) * x).permute(2, 0, 3, 1) + 0,)

    assert not programs.judge(programs.Program(fn, [torch.randn(2, 1)], "")).failure


def test_gradients_are_contractions_too(rewritten):
    x, y = torch.randn(B, I, K, requires_grad=True), torch.randn(B, J, K, requires_grad=True)
    outcome = rewritten(SPELLINGS["none_index"], x, y)
    assert outcome.names == ["recover contraction"] * 3
    assert outcome.worst() < 1e-6


LEFT_ALONE = {
    "norm": (lambda x: x.square().sum(-1), (torch.randn(4, 8),)),
    "dot": (lambda x, y: (x * y).sum(-1), (torch.randn(4, 8), torch.randn(4, 8))),
    "matrix_vector": (lambda x, y: (x * y).sum(-1), (torch.randn(4, 8), torch.randn(8))),
    "integers": (lambda x: (x[:, None] * x[None]).sum(-1), (torch.randint(9, (4, 5)),)),
    "complex": (lambda x: (x[:, None] * x[None]).sum(-1), (torch.randn(4, 5, dtype=torch.complex64),)),
    "mixed_dtypes": (lambda x, y: (x[:, None] * y[None]).sum(-1), (torch.randn(4, 5), torch.randn(3, 5).double())),
    "sum_in_other_dtype": (lambda x: (x[:, None] * x[None]).sum(-1, dtype=torch.float64), (torch.randn(4, 5),)),
    "product_used_elsewhere": (
        lambda x, y: ((p := x[:, None] * y[None]).sum(-1), p.exp()),
        (torch.randn(4, 5), torch.randn(3, 5)),
    ),
    "nonlinear_between": (lambda x, y: (x[:, None] * y[None]).exp().sum(-1), (torch.randn(4, 5), torch.randn(3, 5))),
    "max": (lambda x, y: (x[:, None] * y[None]).amax(-1), (torch.randn(4, 5), torch.randn(3, 5))),
    "added": (lambda x, y: (x[:, None] + y[None]).sum(-1), (torch.randn(4, 5), torch.randn(3, 5))),
    "empty": (lambda x, y: (x[:, None] * y[None]).sum(-1), (torch.randn(0, 5), torch.randn(3, 5))),
    "empty_reduction": (lambda x, y: (x[:, None] * y[None]).sum(-1), (torch.randn(4, 0), torch.randn(3, 0))),
    "dropout_between": (
        lambda x, y: torch.nn.functional.dropout(x[:, None] * y[None], 0.5, True).sum(-1),
        (torch.randn(4, 5), torch.randn(3, 5)),
    ),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_is_no_contraction_or_not_worth_one_stays(rewritten, name):
    fn, inputs = LEFT_ALONE[name]
    outcome = rewritten(fn, *inputs)
    assert outcome.names == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floating_dtypes(rewritten, dtype):
    from refold.verify.numerics import unit_roundoff

    x, y = torch.randn(B, I, K, dtype=dtype), torch.randn(B, J, K, dtype=dtype)
    outcome = rewritten(SPELLINGS["none_index"], x, y)
    assert outcome.names == ["recover contraction"]
    assert outcome.worst() <= (8 + K**0.5 / 2) * unit_roundoff(dtype)


def test_half_precision_does_not_overflow_where_the_original_does_not(rewritten):
    x, y = (torch.full((8, 4096), 100.0, dtype=torch.float16) for _ in range(2))
    scaled = rewritten(lambda x, y: (x[:, None] * 1e-4 * y[None]).sum(-1), x, y)
    assert scaled.names == ["recover contraction"]
    mean = rewritten(lambda x, y: (x[:, None] * y[None]).mean(-1), x, y)
    for outcome in (scaled, mean):
        assert bool(outcome.before[0].isfinite().all())
        assert outcome.worst() < 0.01


@pytest.mark.parametrize("layout", ["transposed", "expanded", "offset", "strided"])
def test_input_layouts(rewritten, layout):
    x = {
        "transposed": lambda: torch.randn(K, I).mT,
        "expanded": lambda: torch.randn(1, K).expand(I, K),
        "offset": lambda: torch.randn(I + 2, K + 1)[2:, 1:],
        "strided": lambda: torch.randn(2 * I, K)[::2],
    }[layout]()
    outcome = rewritten(lambda x, y: (x[:, None] * y[None]).sum(-1), x, torch.randn(J, K))
    assert outcome.names == ["recover contraction"]
    assert outcome.worst() < 1e-6


def test_a_refused_site_stays(rewritten):
    x, y = torch.randn(B, I, K), torch.randn(B, J, K)
    outcome = rewritten(SPELLINGS["none_index"], x, y, wanted=lambda site: False)
    assert outcome.names == []
    assert any("aten.sum" in target for target in outcome.targets)


@st.composite
def einsums(draw):
    """Draw two or three factors over up to five axes, an output, and a broadcast-multiply-sum spelling."""
    sizes = {letter: draw(st.integers(1, 4)) for letter in "abcde"}
    terms = draw(st.lists(st.sets(st.sampled_from("abcde"), min_size=1, max_size=4), min_size=2, max_size=3))
    used = sorted(set().union(*terms))
    summed = draw(st.sets(st.sampled_from(used), min_size=1, max_size=3))
    layout = draw(st.permutations(used))
    return sizes, [sorted(term) for term in terms], sorted(summed), layout


@pytest.mark.exhaustive
@hypothesis.settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
@hypothesis.given(case=einsums())
def test_random_broadcast_multiply_sums(rewritten, case):
    torch._dynamo.reset()
    sizes, terms, summed, layout = case

    def spread(x, term):
        order = sorted(term, key=layout.index)
        x = x.permute([term.index(axis) for axis in order])
        return x.reshape([sizes[axis] if axis in term else 1 for axis in layout])

    def fn(*factors):
        product = spread(factors[0], terms[0])
        for x, term in zip(factors[1:], terms[1:], strict=True):
            product = product * spread(x, term)
        return product.sum([layout.index(axis) for axis in summed])

    inputs = [torch.randn([sizes[axis] for axis in term], dtype=torch.float64) for term in terms]
    outcome = rewritten(fn, *inputs)
    assert outcome.worst() < 1e-13
