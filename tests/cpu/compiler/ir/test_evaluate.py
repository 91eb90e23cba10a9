"""The reference evaluator: blocked sums equal plain ones, in bounded memory and in float64."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from refold.compiler.ir import evaluate as module
from refold.compiler.ir.evaluate import evaluate, values_at, with_gradients
from refold.verify.memory import peak_bytes


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dims", [[-1], [1], [0, 2], [0, 1, 2]])
def test_blocked_products_equal_plain_ones(monkeypatch, dims, keepdim):
    monkeypatch.setattr(module, "BLOCK", 64)

    def fn(a, b):
        return torch.ops.aten.sum.dim_IntList(a[:, None] * b[None], dims, keepdim)

    a, b = torch.randn(7, 11), torch.randn(13, 11)
    gm = make_fx(fn)(a, b)
    assert torch.allclose(evaluate(gm, [a, b]), fn(a, b), atol=1e-5)
    exact = evaluate(gm, [a, b], torch.float64)
    assert exact.dtype == torch.float64
    assert torch.allclose(exact, fn(a.double(), b.double()))


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dims", [[3], [0, 1], [1, 2, 4], [0, 1, 2, 3, 4]])
def test_the_reference_sums_products_by_position(monkeypatch, dims, keepdim):
    """Axes of both, of one, of neither operand, and of size one; summed and kept."""
    monkeypatch.setattr(module, "WRITTEN_OUT", 0)
    a = torch.randn(2, 1, 5, 4, 1, dtype=torch.float64).expand(2, 3, 5, 4, 1)
    b = torch.randn(1, 1, 5, 1, 1, dtype=torch.float64).expand(2, 3, 5, 4, 1)
    for sums in (torch.ops.aten.sum.dim_IntList, torch.ops.aten.mean.dim):
        gm = make_fx(lambda a, b: sums(a * b, dims, keepdim))(a, b)  # noqa: B023
        got, expected = evaluate(gm, [a, b], torch.float64), sums(a * b, dims, keepdim)
        assert got.shape == expected.shape
        assert torch.allclose(got, expected, rtol=1e-13, atol=1e-13)


def test_memory_stays_bounded():
    a, b = torch.randn(2000, 1, 40), torch.randn(1, 1500, 40)
    gm = make_fx(lambda a, b: (a * b).sum(-1))(a, b)
    assert peak_bytes(lambda: evaluate(gm, [a, b], torch.float64), torch.device("cpu")) < 2000 * 1500 * 40 * 8 / 3


def test_casts_inside_the_graph_are_widened():
    gm = make_fx(lambda x: (x.to(torch.bfloat16) * 3).float())(torch.randn(4))
    x = torch.randn(4)
    assert torch.equal(evaluate(gm, [x], torch.float64), x.double() * 3)


def test_float64_inside_the_graph_is_narrowed():
    def fn(x, y):
        return (x.to(torch.float64) + torch.full_like(x, 1.0, dtype=torch.float64) / 3) * y

    x, y = torch.randn(4, dtype=torch.float64), torch.randn(4, dtype=torch.bfloat16)
    got = evaluate(make_fx(fn)(x, y), [x, y], torch.float32)
    assert torch.equal(got, (x.float() + torch.ones(4) / 3) * y)


def test_gradients_in_another_dtype():
    def fn(x):
        return x.exp()

    x = torch.randn(5, dtype=torch.float64)
    narrow, wide = (with_gradients(make_fx(fn)(x), [x], [True], dtype) for dtype in (torch.float32, None))
    for a, b in zip(narrow, wide, strict=True):
        assert (a.dtype, b.dtype) == (torch.float32, torch.float64)
        assert 0 < (a - b).norm() < 4 * torch.finfo(torch.float32).eps * b.norm()


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_gradients_of_a_product_in_blocks_are_no_larger_than_its_factors(monkeypatch, dtype):
    """A part of a factor that was expanded first has a gradient as large as the product."""
    monkeypatch.setattr("refold.compiler.ir.evaluate.BLOCK", 64)
    monkeypatch.setattr("refold.compiler.ir.evaluate.WRITTEN_OUT", 64)
    x, y = torch.randn(32, 1, 16), torch.randn(24, 16)
    gm = make_fx(lambda a, b: (a * b).sum(-1))(x, y)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            made = [v for v in torch.utils._pytree.tree_leaves(out) if isinstance(v, torch.Tensor)]
            largest = max([largest, *(v.untyped_storage().nbytes() // v.element_size() for v in made)])
            return out

    with Watch():
        got = with_gradients(gm, [x, y], [True, True], dtype)
    want = with_gradients(gm, [x.double(), y.double()], [True, True])
    assert largest < 32 * 24 * 16
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.double(), w, rtol=1e-4, atol=1e-4)


def test_values_after_a_vmap_that_dynamo_wrote_out():
    found = {}

    def look(gm, inputs):
        found["graph"] = gm.graph
        return gm.forward

    def twice(x, y):
        return torch.vmap(torch.add)(torch.vmap(torch.mul)(x, y), x).sin()

    x, y = torch.randn(3, 4), torch.randn(3, 4)
    torch._dynamo.reset()
    expected = torch.compile(twice, backend=look, fullgraph=True)(x, y)
    assert any("vmap" in node.name for node in found["graph"].nodes)
    last = next(node.name for node in reversed(found["graph"].nodes) if node.name.startswith("sin"))
    assert torch.equal(values_at(found["graph"], [last], [x, y])[last], expected)
