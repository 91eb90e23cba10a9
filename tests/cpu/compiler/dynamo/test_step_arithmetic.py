"""Bodies that compute with the iteration number: it becomes a tensor over time, with the dtypes of Python numbers."""

import math

import pytest
import torch

import refold
from support.scans import spliced

pytestmark = pytest.mark.rows(16)

B, T, D = 2, 24, 4


def xs():
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(0))


def loop_of(step):
    """Return a loop that adds up what a step makes of its number, its item, integers, and the carry."""

    def fn(x):
        h, n, ys = torch.zeros_like(x[:, 0]), (8 * x[:, 0]).long(), []
        for t in range(x.shape[1]):
            h = 0.5 * h + step(t, x[:, t], n, h)
            ys.append(h)
        return torch.stack(ys, 1)

    return fn


# What torch 2.11 decides on the number for, so that each step is another program.
ASKED = {"power of a tensor", "tensor as exponent", "new tensor", "powers of integers", "the carry's power"}


def cases(names):
    old = pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch 2.11 asks for the number here")
    return [pytest.param(name, marks=old if name in ASKED else ()) for name in names]


SCANS = {
    "times": lambda t, u, n, h: u * t * 0.1,
    "decay": lambda t, u, n, h: u * 0.9 ** (T - t),
    "power of two": lambda t, u, n, h: u / 2**t,
    "power of a tensor": lambda t, u, n, h: u.abs().pow(t / 3),
    "tensor as exponent": lambda t, u, n, h: 0.3**t * u + 2**u * 0 + (t + 1) ** u * 0.01,
    "mean": lambda t, u, n, h: (u - 0.5 * h) / (t + 1),
    "carry": lambda t, u, n, h: u + h * (t / T) * 0.25,
    "bias correction": lambda t, u, n, h: u / (1 - 0.9 ** (t + 1)),
    "lengths": lambda t, u, n, h: torch.where(t < n, u, -u),
    "number comes first": lambda t, u, n, h: (t - u) * 0.1 + 1.0 / (t + 1),
    "floor, remainder": lambda t, u, n, h: u * (t // 2 - t % 3),
    "functions": lambda t, u, n, h: u * math.sin(t / 10) + math.sqrt(t + 1),
    "extremes": lambda t, u, n, h: u * max(t, 3) / min(t + 1, 10),
    "condition": lambda t, u, n, h: u * (t > 3),
    "filled": lambda t, u, n, h: torch.full_like(u, t) + torch.full((D,), t * 0.5),
    "new tensor": lambda t, u, n, h: u.new_tensor(t) * u,
    "one hot": lambda t, u, n, h: u + (torch.arange(D) == t).float(),
    "integers": lambda t, u, n, h: (n * t) / 100 + n / (t + 1),
    "integers and floats": lambda t, u, n, h: n * (t * 0.01),
    "float64": lambda t, u, n, h: (u.double() * 0.9**t).float(),
}  # fmt: skip


@pytest.mark.parametrize("name", cases(SCANS))
def test_they_become_scans(name):
    fn = loop_of(SCANS[name])
    run, report = spliced(fn)
    got, expected = run(xs()), fn(xs())
    # Each step rounds some times; the carry's factor is at most three quarters.
    scale = float(expected.abs().max())
    torch.testing.assert_close(got, expected, rtol=0, atol=32 * scale * torch.finfo(torch.float32).eps)
    assert ["loop_over_time" in row.site for row in report.rewrites] == [True]


@pytest.mark.parametrize("name", cases(["decay", "power of a tensor", "carry", "lengths"]))
def test_gradients(name):
    torch._dynamo.reset()
    fn, x = loop_of(SCANS[name]), xs().requires_grad_()
    compiled = refold.compile(fn, accept="always", strict=True)
    grads = [torch.autograd.grad(f(x).square().sum(), x)[0] for f in (compiled, fn)]
    scale = float(grads[1].abs().max())
    torch.testing.assert_close(*grads, rtol=0, atol=8 * T * scale * torch.finfo(torch.float32).eps)
    rows = [row for row in compiled.report.rewrites if "loop_over_time" in row.site]
    assert [row.status for row in rows] == ["applied"], rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_number_keeps_a_low_precision(dtype):
    torch._dynamo.reset()
    fn, x = loop_of(SCANS["times"]), xs().to(dtype)
    compiled = refold.compile(fn, accept="always", strict=True)
    got, expected = compiled(x), fn(x.double())
    assert got.dtype == dtype
    scale = float(expected.abs().max())
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=8 * scale * torch.finfo(dtype).eps)


STAY = {
    "too large": (lambda t, u, n, h: u * 5**t * 1e-16, "too large"),
    "clamp": (lambda t, u, n, h: u.clamp(max=t), "passes its number to aten.clamp.default"),
    "powers of integers": (lambda t, u, n, h: (n.abs() % 2) ** t + u, "powers of integers"),
    "low precision": (lambda t, u, n, h: (u.bfloat16() > t * 0.1).float(), "compares numbers of low precision"),
    "the carry's power": (lambda t, u, n, h: u + h.abs().clamp(max=1) ** t, "carry"),
    "a number that it asks for": (lambda t, u, n, h: u * math.exp(-t), "is not true"),
}


@pytest.mark.parametrize("name", cases(STAY))
def test_others_stay_and_the_report_says_why(name):
    torch._dynamo.reset()
    step, why = STAY[name]
    fn = loop_of(step)
    compiled = refold.compile(fn, accept="always", strict=True, verify="off")
    torch.testing.assert_close(compiled(xs()), fn(xs()))
    assert any(why in note for graph in compiled.report.graphs for note in graph.notes)
    assert not any("loop_over_time" in row.site for row in compiled.report.rewrites)
