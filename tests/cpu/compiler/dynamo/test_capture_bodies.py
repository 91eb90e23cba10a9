"""Bodies of captured loops: constants, normalisation, slices that take all; and bodies that are left alone."""

import pytest
import torch
import torch.nn.functional as F

import refold
from support.scans import spliced

pytestmark = pytest.mark.rows(16)

B, T, D = 2, 24, 4


def xs(dtype=torch.float32, grad=False):
    x = torch.randn(B, T, D, generator=torch.Generator().manual_seed(0)).to(dtype)
    return x.requires_grad_(grad)


def loop_of(step):
    def fn(x):
        h, ys = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = step(t, h, x[:, t])
            ys.append(h)
        return torch.stack(ys, 1)

    return fn


def constant_before(x):
    a = torch.tensor([0.9, 0.8, 0.0, -0.5])
    return loop_of(lambda t, h, u: a * h + u)(x) * torch.tensor(2.0)


def constant_by_step(x):
    a = torch.tensor([0.9 - 0.01 * i for i in range(T)])
    return loop_of(lambda t, h, u: a[t] * h + u)(x)


def gated(x, w):
    h, ys = None, []
    for t in range(x.shape[1]):
        hidden, gate = (x[:, t : t + 1] @ w).chunk(2, dim=-1)
        h = hidden * gate.sigmoid() if h is None else torch.lerp(h, hidden, gate.sigmoid())
        h = h[:, -1:]  # takes all
        ys.append(h)
    return torch.cat(ys, 1)


def takes_all(x):
    h, ys = torch.zeros_like(x[:, :1]), []
    for t in range(x.shape[1]):
        h = (0.5 * h + x[:, t : t + 1])[:, -1:]
        ys.append(h[:, 0])
    return torch.stack(ys, 1)


SCANS = {
    "constant before": constant_before,
    "constant by step": constant_by_step,
    "constant inside": loop_of(lambda t, h, u: torch.tensor([0.9, 0.8, 0.0, -0.5]) * h + u * torch.tensor(2.0)),
    "lerp": loop_of(lambda t, h, u: torch.lerp(h, u, 0.1)),
    "lerp by gates": loop_of(lambda t, h, u: h.lerp(u.tanh(), u.sigmoid())),
    "in location with a factor": loop_of(lambda t, h, u: h.clone().mul_(0.9).add_(u, alpha=0.1)),
    "less a part": loop_of(lambda t, h, u: torch.sub(u, h, alpha=0.5)),
    "layer norm": loop_of(lambda t, h, u: 0.9 * h + F.layer_norm(u, (D,))),
    "rms norm": loop_of(lambda t, h, u: 0.9 * h + F.rms_norm(u, (D,))),
    "convolution": loop_of(lambda t, h, u: 0.9 * h + F.conv1d(u[:, None], torch.ones(2, 1, 3), padding=1).sum(1)),
    "embedding": loop_of(lambda t, h, u: 0.9 * h + u * F.embedding((u > 0).long(), torch.ones(2, 1)).squeeze(-1)),
    "norm": loop_of(lambda t, h, u: 0.9 * h + F.normalize(u, dim=-1) * u.max(-1, keepdim=True).values),
    "sums of exponentials": loop_of(lambda t, h, u: 0.5 * h + u.logsumexp(-1, keepdim=True) - u.flip(0).cumprod(-1)),
    "gated": lambda x: gated(x, torch.linspace(-1, 1, 2 * D * D).view(D, 2 * D)),
    "slice takes all": takes_all,
}


def agree(run, fn, grad):
    x = xs(grad=grad)
    got, expected = run(x), fn(x)
    torch.testing.assert_close(got, expected)
    if grad:
        (own,), (eager,) = (torch.autograd.grad(y.sin().sum(), x) for y in (got, expected))
        torch.testing.assert_close(own, eager, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SCANS)
@pytest.mark.parametrize("grad", [False, True])
def test_they_become_scans(name, grad):
    run, report = spliced(SCANS[name], "training" if grad else "inference")
    agree(run, SCANS[name], grad)
    assert [row.name for row in report.rewrites] == ["roll up loop"]


def test_two_loops_that_differ_in_a_constant_are_two_programs():
    def both(x):
        first = loop_of(lambda t, h, u: torch.tensor([0.9, 0.8, 0.0, -0.5]) * h + u)(x)
        return first, loop_of(lambda t, h, u: torch.tensor([0.1, 0.2, 0.3, 0.4]) * h + u)(x)

    compiled = refold.compile(both, accept="always", strict=True)
    for got, expected in zip(compiled(xs()), both(xs()), strict=True):
        torch.testing.assert_close(got, expected)
    assert [row.status for row in compiled.report.rewrites] == ["applied", "applied"]


@pytest.mark.exhaustive
@pytest.mark.codegen
def test_draws_are_those_of_torch_compile():
    def fn(x):
        return loop_of(lambda t, h, u: 0.9 * h + F.dropout(u, 0.3, True))(x[:, :16])

    results = []
    for compiled in (torch.compile(fn), refold.compile(fn, strict=True, accept="always", verify="off")):
        torch._dynamo.reset()
        x = xs(grad=True)
        compiled(x)  # what compiling draws does not count
        torch.manual_seed(0)
        y = compiled(x)
        results.append((y, *torch.autograd.grad(y.sum(), x), torch.rand(1)))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)
    (graph,) = compiled.report.graphs
    assert graph.mode == "training"
    assert any("draws random numbers" in note for note in graph.notes)
