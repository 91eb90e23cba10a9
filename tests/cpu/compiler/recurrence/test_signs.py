"""Signs that are derived hold for all values."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from refold.compiler.dynamo.to_aten import to_aten
from refold.compiler.recurrence.signs import NEGATIVE, POSITIVE, UNKNOWN, sign

pytestmark = pytest.mark.rows(16)


def sign_of(fn):
    mode = FakeTensorMode()
    with mode:
        x = torch.empty(3)
    graph = to_aten(mode, fn, x, to_read=True).graph
    return sign(graph.output_node().args[0])


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (F.softplus, POSITIVE),
        (lambda x: F.softplus(x, beta=2.0), POSITIVE),
        (lambda x: -torch.exp(x)[None].expand(2, 3), NEGATIVE),
        (lambda x: F.softplus(x).bfloat16().clamp(min=0.0, max=torch.inf), POSITIVE),
        (lambda x: x.clamp(min=-0.1), UNKNOWN),
        (lambda x: x.clamp(max=-0.1), NEGATIVE),
        (lambda x: torch.exp(x) * -torch.sigmoid(x) * 2, NEGATIVE),
        (lambda x: F.logsigmoid(x) / 16, NEGATIVE),
        (lambda x: torch.sigmoid(x).clamp(min=1e-6).log(), NEGATIVE),
        (lambda x: torch.sigmoid(x).clamp(min=2.0).log(), UNKNOWN),
        (lambda x: F.softplus(x) + 1, POSITIVE),
        (lambda x: F.softplus(x) - 1, UNKNOWN),
        (lambda x: torch.full((3,), -2.0, dtype=torch.bfloat16), NEGATIVE),
        (torch.tanh, UNKNOWN),
        (lambda x: torch.pow(0.5, x), POSITIVE),
        (lambda x: torch.sigmoid(x) ** x, POSITIVE),
        (lambda x: x**x, UNKNOWN),
        (lambda x: torch.where(x > -1, x, 0.0), UNKNOWN),
        (lambda x: torch.where(x > 1, x, 0.0), POSITIVE),
    ],
)
def test_signs(fn, expected):
    found = sign_of(fn)
    assert (found.nonnegative, found.nonpositive) == (expected.nonnegative, expected.nonpositive)


UNARY = [
    torch.exp, torch.neg, torch.sigmoid, F.softplus, F.logsigmoid, torch.relu, torch.abs, lambda x: x.clamp(min=-1.0),
    lambda x: x.clamp(max=0.5), lambda x: x.clamp(min=0.0), lambda x: x * -2, lambda x: x + 0.5, lambda x: x - 0.5,
    lambda x: torch.where(x > 0.5, x, -x), lambda x: x.cumsum(0), lambda x: x.double().float(), torch.log1p,
]  # fmt: skip
BINARY = [torch.mul, torch.add, torch.sub, torch.div, torch.minimum, lambda a, b: torch.where(a > 0, a, b)]


def programs():
    leaf = st.just(lambda x: x)
    unary = lambda inner: st.tuples(st.sampled_from(UNARY), inner).map(lambda t: lambda x: t[0](t[1](x)))  # noqa: E731
    binary = lambda inner: st.tuples(st.sampled_from(BINARY), inner, inner).map(  # noqa: E731
        lambda t: lambda x: t[0](t[1](x), t[2](x))
    )
    return st.recursive(leaf, lambda inner: unary(inner) | binary(inner), max_leaves=6)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(fn=programs(), seed=st.integers(0, 1000))
def test_no_sign_is_wrong(fn, seed):
    found = sign_of(fn)
    torch.manual_seed(seed)
    y = fn(torch.cat([torch.randn(40) * 3, torch.tensor([0.0, 1e-30, -1e-30, 90.0, -90.0])]))
    y = y[~y.isnan()]
    assert not (found.nonnegative and bool((y < 0).any()))
    assert not (found.nonpositive and bool((y > 0).any()))
