"""Sums that are divided by a product over time, and multiplied by it again, become scans; others stay."""

import pytest
import torch
import torch.nn.functional as F

import refold
from refold.compiler.recurrence import scanned

pytestmark = pytest.mark.rows(16)


def logarithms(f, i):
    sums = F.logsigmoid(f).cumsum(1)
    return ((i - sums).logcumsumexp(dim=1) + sums).exp()


def logarithm_alone(f, i):
    sums = torch.cumsum(F.logsigmoid(f), -2)
    return sums + torch.logcumsumexp(i - sums, -2)


def with_a_first_state(f, i):
    """The state before the first step stands before the inputs (Feng et al. 2024)."""
    sums = F.pad(F.logsigmoid(f[:, 1:]).cumsum(dim=1), (0, 0, 1, 0))
    return torch.exp(sums + torch.logcumsumexp(i - sums, dim=1))[:, 1:]


def padded_factors(f, i):
    sums = F.pad(F.logsigmoid(f[:, 1:]), (0, 0, 1, 0)).cumsum(1)
    return torch.exp(sums + torch.logcumsumexp(i - sums, dim=1))


def quotient(f, x):
    product = f.sigmoid().cumprod(1)
    return product * (x / product).cumsum(1)


def exponentials(f, x):
    sums = F.logsigmoid(f).cumsum(1)
    return (x * torch.exp(-sums)).cumsum(dim=1) * sums.exp()


def quotient_of_exponentials(f, x):
    decay = F.logsigmoid(f[..., :1]).cumsum(1).exp()
    return decay * torch.cumsum(x / decay, 1)


def other_signs(f, i):
    sums = F.softplus(f).cumsum(1)
    return ((sums + i).logcumsumexp(1) - sums).exp()


def a_negative_sum(f, i):
    sums = -F.softplus(f).cumsum(1)
    return (sums + (i - sums).logcumsumexp(1)).exp()


def negative_exponentials(f, x):
    sums = F.softplus(f).cumsum(1)
    return torch.exp(-sums) * (x * sums.exp()).cumsum(1)


def channels_first(f, x):
    product = f.sigmoid().mT.cumprod(-1)
    return ((x.mT / product).cumsum(-1) * product).mT


def against_time(f, x):
    return quotient(f.flip(1), x.flip(1)).flip(1)


FOUND = (logarithms, logarithm_alone, with_a_first_state, padded_factors, quotient, exponentials,
         quotient_of_exponentials, other_signs, a_negative_sum, negative_exponentials, channels_first,
         against_time)  # fmt: skip


def inputs(steps=24, channels=6):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, steps, channels, generator=generator), torch.randn(2, steps, channels, generator=generator)


@pytest.mark.parametrize("fn", FOUND)
@pytest.mark.parametrize("dynamic", [False, True])
def test_they_are_scans(rewritten, fn, dynamic):
    outcome = rewritten(fn, *inputs(), dynamic=dynamic)
    assert outcome.names == ["replace rescaled sum"]
    assert outcome.worst() < 1e-5
    assert not any("cumsum" in target or "cumprod" in target for target in outcome.targets)


def test_no_product_underflows(rewritten):
    """Products over time leave the range of float32 here; the recurrence itself does not."""
    f, x = inputs(steps=400)
    (y,) = rewritten(quotient, f - 1, x).after
    h, a = torch.zeros(2, 6), (f - 1).sigmoid()
    for t in range(400):
        h = a[:, t] * h + x[:, t]
        torch.testing.assert_close(y[:, t], h, rtol=1e-4, atol=1e-5)


OTHERS = {
    "another product": lambda f, x: f.sigmoid().cumprod(1) * (x / (f + 1).sigmoid().cumprod(1)).cumsum(1),
    "another axis": lambda f, x: (p := f.sigmoid().cumprod(2)) * (x / p).cumsum(1),
    "the product itself": lambda f, x: f.sigmoid().cumprod(1) * (x * f.sigmoid().cumprod(1)).cumsum(1),
    "the sum is read": lambda f, x: ((s := (x / (p := f.sigmoid().cumprod(1))).cumsum(1)) * p, s),
    "the other sign": lambda f, x: (s := f.cumsum(1)).exp() * (x * s.exp()).cumsum(1),
    "subtracted": lambda f, x: (x - (s := f.cumsum(1))).logcumsumexp(1) - s,
    "padded by another number": lambda f, x: (
        (s := F.pad(f[:, 1:].cumsum(1), (0, 0, 1, 0), value=1.0)) + (x - s).logcumsumexp(1)
    ),
    "padded at the end": lambda f, x: (s := F.pad(f[:, 1:].cumsum(1), (0, 0, 0, 1))) + (x - s).logcumsumexp(1),
    "few steps": lambda f, x: quotient(f[:, :4], x[:, :4]),
}


@pytest.mark.parametrize("fn", OTHERS.values(), ids=OTHERS)
def test_others_stay(rewritten, fn):
    assert "replace rescaled sum" not in rewritten(fn, *inputs()).names


def compiled(fn, training):
    xs = [x.requires_grad_(training) for x in inputs(steps=40)]
    run = refold.compile(fn, accept="always", cache=False, choose={"passes": ["replace rescaled sums"]})
    got, want = run(*xs), fn(*(x.double() for x in xs))
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
    if training:
        gradients = [torch.autograd.grad(y.square().sum(), xs) for y in (got, want)]
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)
    (row,) = run.report.rewrites
    return row


def test_checked_with_gradients():
    assert compiled(logarithms, True).status == "applied"


def test_a_wrong_one_is_refused(monkeypatch):
    loop = scanned.Loop

    def begun(*args, **given):
        return loop(*args, **{**given, "initial": 1.0})

    monkeypatch.setattr(scanned, "Loop", begun)
    row = compiled(quotient, False)
    assert row.status == "refused"
    assert "[not-equal]" in row.reason
