"""Large float32 products go to oneDNN, whatever their layout; all others stay."""

import pytest
import torch

import refold
from refold.compiler.passes.prefer_onednn import ONEDNN_LINEAR
from refold.verify.numerics import unit_roundoff

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch is built without oneDNN")


@pytest.mark.parametrize("transposed", [False, True])
def test_equal_in_both_layouts(rewritten, transposed):
    a, b = torch.randn(200, 300), torch.randn(300, 100)
    b = b.T.contiguous() if transposed else b
    outcome = rewritten(lambda a, b: a @ (b.T if transposed else b), a, b)
    assert outcome.names == ["prefer oneDNN"]
    assert outcome.rewrites[0].after.flops == outcome.rewrites[0].before.flops == 2 * 200 * 300 * 100
    assert outcome.worst() <= (8 + 300**0.5 / 2) * unit_roundoff(torch.float32)


@pytest.mark.parametrize(
    ("bias", "found"), [(torch.randn(100), ["prefer oneDNN"]), (torch.randn(200, 100), []), (torch.randn(200, 1), [])]
)
def test_a_bias_is_added_if_it_is_one_number_a_column(rewritten, bias, found):
    outcome = rewritten(torch.addmm, bias, torch.randn(200, 300), torch.randn(300, 100))
    assert outcome.names == found
    assert outcome.worst() < 1e-6


def test_a_recovered_contraction_goes_there_too(rewritten):
    outcome = rewritten(lambda a, b: (a[:, None] * b[None]).sum(-1), torch.randn(200, 300), torch.randn(100, 300))
    assert outcome.names == ["recover contraction", "prefer oneDNN"]
    assert outcome.worst() < 1e-6


@pytest.mark.parametrize(
    "inputs",
    [
        (torch.randn(20, 30), torch.randn(30, 10)),
        (torch.randn(200, 300).double(), torch.randn(300, 100).double()),
        (torch.randn(200, 300).bfloat16(), torch.randn(300, 100).bfloat16()),
    ],
    ids=["small", "float64", "bfloat16"],
)
def test_others_stay(rewritten, inputs):
    assert rewritten(lambda a, b: a @ b, *inputs).names == []


@pytest.mark.parametrize("columns", [False, True])
def test_onednn_gets_no_weight_with_gaps(columns, monkeypatch):
    x, weight = torch.randn(200, 300), torch.randn(300, 200)[:, :100].T if columns else torch.randn(100, 400)[:, :300]
    weights, product = [], torch.ops.mkldnn._linear_pointwise
    monkeypatch.setattr(
        torch.ops.mkldnn, "_linear_pointwise", lambda x, w, *others: (weights.append(w), product(x, w, *others))[1]
    )
    torch.testing.assert_close(ONEDNN_LINEAR(x, weight, None), x @ weight.T, rtol=0.0, atol=1e-3)
    assert weights[0].is_contiguous()


def test_compiled_with_gradients():
    layer = torch.nn.Linear(300, 100)
    x = torch.randn(200, 300, requires_grad=True)
    weights = [x, *layer.parameters()]
    expected = torch.autograd.grad(layer(x).tanh().sum(), weights)
    compiled = refold.compile(lambda x: layer(x).tanh().sum(), accept="always", strict=True)
    for a, b in zip(torch.autograd.grad(compiled(x), weights), expected, strict=True):
        assert float((a - b).norm() / b.norm()) < 64 * unit_roundoff(torch.float32)
