"""Time-invariant scans (S4D): any decay, any length, one chunk or several, values and gradients."""

import pytest
import torch

from refold.compiler.ir.builder import Builder
from refold.compiler.recurrence.lti_chunks import CHUNK, lti_scan
from support.scans import compiled, emitted, flat, names, operators, spliced

pytestmark = pytest.mark.rows(16)

B, D, N = 2, 6, 8
CHUNKS = "linear_scan over chunks"


def inputs(steps=2 * CHUNK + 5, batch=B, dtype=torch.float32):
    g = torch.Generator().manual_seed(steps + batch)
    u, rate, b, c = (torch.randn(*size, generator=g, dtype=dtype) for size in ((batch, steps, D), *[(D, N)] * 3))
    return u, rate, b, c, torch.randn(batch, D, N, generator=g, dtype=dtype)


def s4d(u, rate, b, c, h):
    """Discretised before the loop, from no state."""
    step = rate[:, :1].sigmoid()
    a, b = torch.exp(-torch.exp(rate) * step), b * step
    h, ys = torch.zeros_like(h), []
    for t in range(u.shape[1]):
        h = a * h + b * u[:, t, :, None]
        ys.append((h * c).sum(-1))
    return torch.stack(ys, 1), h


def signed(u, rate, b, c, h):
    """Decays of either sign, a state to start from, a skip connection, an input that is not the batch's first axis."""
    ys = []
    for t in range(u.shape[1]):
        h = rate.tanh() * h + b * u[:, t, :, None]
        ys.append(torch.einsum("bdn,dn->bd", h, c) + u[:, t])
    return torch.stack(ys, 1), h


def output_first(u, rate, b, c, h):
    ys = []
    for t in range(u.shape[1]):
        ys.append(torch.einsum("bdn,dn->bd", h, c))
        h = rate.sigmoid() * h + b * u[:, t, :, None]
    return torch.stack(ys, 1), h


def one_system(u, rate, b, c, h):
    """All channels through one system: what the input is multiplied by has no channels."""
    h, ys = h * 0, []
    for t in range(u.shape[1]):
        h = rate[0].sigmoid() * h + b[0] * u[:, t, :, None]
        ys.append(h @ c[0])
    return torch.stack(ys, 1), h


FOUND = [s4d, signed, output_first, one_system]


def close(got, want):
    for a, b in zip(got, want, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        # Sums over the steps of a chunk and over states, in another order, of products that are rounded a few times.
        assert (a - b).norm() <= 4 * N * CHUNK**0.5 * torch.finfo(a.dtype).eps * b.norm()


def agree(run, fn, batch, dtype):
    results = []
    for program in (run, fn):
        leaves = [x.requires_grad_() for x in inputs(batch=batch, dtype=dtype)]
        ys = flat(program(*leaves))
        weights = [torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=dtype) for y in ys]
        gradients = torch.autograd.grad(ys, leaves, weights, allow_unused=True, materialize_grads=True)
        results.append([*(y.detach() for y in ys), *gradients])
    close(*results)


@pytest.mark.parametrize("fn", FOUND)
@pytest.mark.parametrize(("batch", "dtype"), [(1, torch.float32), (2, torch.float64)], ids=["one", "two64"])
def test_values_and_gradients(fn, batch, dtype):
    run, report = spliced(fn, "training")
    agree(run, fn, batch, dtype)
    assert names(report.rewrites) == [CHUNKS]


def test_training():
    run = compiled(signed)
    agree(run, signed, 2, torch.float64)
    assert operators(run) == [CHUNKS]


@pytest.mark.exhaustive
def test_inference():
    run = compiled(signed)
    with torch.no_grad():
        close(flat(run(*inputs())), flat(signed(*inputs())))
    assert operators(run) == [CHUNKS]


@pytest.mark.parametrize("steps", [1, 7, CHUNK, CHUNK + 1, 3 * CHUNK])
@pytest.mark.parametrize("decay", [0.0, 1e-30, 1.0, -0.9, 1.02], ids=lambda a: f"decay{a}")
def test_lengths_and_decays(steps, decay):
    u, rate, b, c, h = inputs(steps, dtype=torch.float64)
    a = torch.where(rate > 0, decay, 0.5)
    states, ys = h, []
    for t in range(steps):
        states = a * states + b * u[:, t, :, None]
        ys.append((states * c).sum(-1))
    y, last = emitted(lti_scan, *(x.float() for x in (c, b, a, u.permute(2, 1, 0), h.permute(1, 2, 0))))
    close([y.permute(2, 1, 0), last.permute(2, 0, 1)], [torch.stack(ys, 1).float(), states.float()])


def decaying_by(decay):
    """Return a loop; ``decay`` is called with rates, the input of a step, and the state before the loop."""

    def fn(u, rate, b, c, h):
        start, ys = h, []
        for t in range(u.shape[1]):
            h = decay(rate, u[:, t, :, None], start) * h + b * u[:, t, :, None]
            ys.append((h * c).sum(-1))
        return torch.stack(ys, 1)

    return fn


def states_used_otherwise(u, rate, b, c, h):
    ys, zs = [], []
    for t in range(u.shape[1]):
        h = rate.sigmoid() * h + b * u[:, t, :, None]
        ys.append((h * c).sum(-1))
        zs.append(h.amax(-1))
    return torch.stack(ys, 1), torch.stack(zs, 1)


OTHERS = {
    "a decay in time": decaying_by(lambda rate, u, start: (rate * u).sigmoid()),
    "a decay of each sequence": decaying_by(lambda rate, u, start: start.sigmoid()),
    "states that are used otherwise": states_used_otherwise,
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("fn", OTHERS.values(), ids=OTHERS)
def test_other_scans_keep_their_states(fn):
    run = compiled(fn)
    with torch.no_grad():
        close(flat(run(*inputs())), flat(fn(*inputs())))
    assert operators(run) == ["linear_scan"]


def test_wrong_ones_are_refused(monkeypatch):
    right = Builder.positions

    def wrong(emit, count, device):
        return emit.call(torch.ops.aten.add.Tensor, right(emit, count, device), 1)

    monkeypatch.setattr(Builder, "positions", wrong)
    run = compiled(s4d)
    with torch.no_grad():
        close(flat(run(*inputs())), flat(s4d(*inputs())))
    assert operators(run) == ["linear_scan"]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_time_and_column(bad):
    steps = CHUNK + 9
    q, k, a = (torch.randn(1, N) for _ in range(3))
    x = torch.randn(1, steps, 3)
    x[:, 20:, 1] = bad
    y, last = emitted(lambda *xs: lti_scan(*xs, None), q, k, a.sigmoid(), x)
    assert bool(y[:, :20].isfinite().all())
    assert bool(y[:, :, [0, 2]].isfinite().all())
    assert not bool(y[:, 20:, 1].isfinite().any())
    assert torch.equal(last.isfinite(), torch.tensor([True, False, True]).expand(1, N, 3))
