"""Segment sums become differences of prefix sums, which are more exact; other sums stay as they are."""

import pytest
import torch

pytestmark = pytest.mark.rows(16)


def segment_sum(a, diagonal=-1):
    length = a.shape[-1]
    x = a[..., None].expand(*a.shape, length)
    mask = torch.tril(torch.ones(length, length, dtype=torch.bool), diagonal)
    return x.masked_fill(~mask, 0).cumsum(-2)


def test_it_is_found_and_more_exact_where_the_sums_are_large(rewritten):
    a = -20 * torch.rand(2, 3, 64)
    outcome = rewritten(segment_sum, a)
    assert outcome.names == ["difference segment sums"]
    exact = segment_sum(a.double())
    errors = [float((x.double() - exact).norm()) for x in (*outcome.before, *outcome.after)]
    assert errors[1] <= errors[0]


def test_where_spelled_the_other_way_round(rewritten):
    def spelled(a):
        length = a.shape[-1]
        mask = torch.ones(length, length, dtype=torch.bool).tril(-1)
        return torch.where(mask, a[..., None].expand(*a.shape, length), 0.0).cumsum(-2)

    outcome = rewritten(spelled, torch.randn(2, 16))
    assert outcome.names == ["difference segment sums"]
    assert outcome.worst() < 1e-6


@pytest.mark.parametrize("number", [-1.0, 0.5])
def test_a_number_times_the_copies(rewritten, number):
    outcome = rewritten(lambda a: segment_sum(a * number), torch.randn(2, 16))
    assert outcome.names == ["difference segment sums"]
    assert outcome.worst() < 1e-6


@pytest.mark.parametrize(
    "numbers", [[-torch.inf], [torch.nan], [-torch.inf, torch.nan], [torch.inf, -torch.inf]], ids=str
)
def test_what_is_not_finite_is_so_in_its_segments_only(rewritten, numbers):
    a = torch.randn(2, 24)
    a[0, torch.arange(len(numbers)) * 7 + 5] = torch.tensor(numbers)
    outcome = rewritten(segment_sum, a)
    assert outcome.names == ["difference segment sums"]
    (want,), (got,) = outcome.before, outcome.after
    assert torch.equal(want.isfinite(), got.isfinite())
    assert torch.equal(want == -torch.inf, got == -torch.inf) or torch.inf in numbers
    assert torch.allclose(want[want.isfinite()], got[got.isfinite()], atol=1e-5)


@pytest.mark.parametrize(
    "fn",
    [
        lambda a: segment_sum(a, diagonal=0),
        lambda a: segment_sum(a, diagonal=-2),
        lambda a: segment_sum(a).cumsum(-1),
        lambda a: a[..., None].expand(*a.shape, a.shape[-1]).cumsum(-2),
        lambda a: a.cumsum(-1),
    ],
    ids=["with_diagonal", "two_below", "other_axis", "unmasked", "plain"],
)
def test_near_misses(rewritten, fn):
    outcome = rewritten(fn, torch.randn(2, 16))
    assert outcome.names in ([], ["difference segment sums"])
    assert outcome.worst() < 1e-6


@pytest.mark.parametrize("diagonal", [0, -2])
def test_other_masks_stay(rewritten, diagonal):
    assert rewritten(lambda a: segment_sum(a, diagonal), torch.randn(2, 16)).names == []
