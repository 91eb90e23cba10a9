"""Scans that are in the graph as operators: their states are not written if only a contraction reads them."""

import pytest
import torch

import refold

pytestmark = pytest.mark.rows(16)

B, T, D, N = 2, 24, 6, 4


def tensors():
    g = torch.Generator().manual_seed(0)
    x, dt = torch.randn(B, T, D, generator=g), torch.rand(B, T, D, generator=g)
    projections = (torch.randn(B, T, N, generator=g) for _ in range(2))
    return x, dt, -torch.rand(D, N, generator=g), *projections


def prepared(x, dt, A, Bm):
    """Form decays and inputs before the loop, as many model files do."""
    return torch.exp(torch.einsum("btd,dn->btdn", dt, A)), torch.einsum("btd,btn,btd->btdn", dt, Bm, x)


def loop_and_state(x, dt, A, Bm, C, skipped=(0, 0)):
    decays, inputs = prepared(x, dt, A, Bm)
    h, ys = torch.zeros(x.shape[0], *A.shape), []
    for t in range(skipped[0], x.shape[1] - skipped[1]):
        h = decays[:, t] * h + inputs[:, t]
        ys.append(torch.einsum("bdn,bn->bd", h, C[:, t]))
    return torch.stack(ys, 1), h


def loop(*given):
    return loop_and_state(*given)[0]


def loop_of_the_middle(*given):
    return loop_and_state(*given, skipped=(2, 3))[0]


def loop_with_another_last_step(x, dt, A, Bm, C):
    """The last step is not part of the loop, so the loop reads all but the last of what was prepared."""
    decays, inputs = prepared(x, dt, A, Bm)
    h, ys = torch.zeros(x.shape[0], *A.shape), []
    for t in range(x.shape[1]):
        h = decays[:, t] * h + inputs[:, t]
        ys.append(torch.einsum("bdn,bn->bd", h, C[:, t]))
        if t == x.shape[1] - 1:
            last = 2.0 * h
    return torch.stack(ys, 1), last


def call(x, dt, A, Bm, C):
    h, _ = refold.ops.linear_scan(*prepared(x, dt, A, Bm))
    return torch.einsum("btdn,btn->btd", h, C)


def call_one_decay(x, dt, A, Bm, C):
    decays = torch.exp(dt[..., :1] * A[0, 0])[..., None].expand(*x.shape, A.shape[1])
    h, _ = refold.ops.linear_scan(decays, (dt[..., :1] * x)[..., None] * Bm[:, :, None])
    return torch.einsum("btdn,btn->btd", h, C)


def states_read_otherwise(x, dt, A, Bm, C):
    h, _ = refold.ops.linear_scan(*prepared(x, dt, A, Bm))
    return torch.einsum("btdn,btn->btd", h, C), h.amax((1, 2))


def against_time(x, dt, A, Bm, C):
    h, _ = refold.ops.linear_scan(*prepared(x, dt, A, Bm), reverse=True)
    return torch.einsum("btdn,btn->btd", h, C)


def decays_of_no_known_form(x, dt, A, Bm, C):
    decays, inputs = prepared(x, dt, A, Bm)
    h, _ = refold.ops.linear_scan(decays.cos(), inputs)
    return torch.einsum("btdn,btn->btd", h, C)


def compiled(fn, inputs):
    torch._dynamo.reset()
    run = refold.compile(fn, accept="always", strict=True)
    got = run(*inputs)
    rewrites = [row for graph in run.report.graphs for row in graph.rewrites]
    assert all(row.status == "applied" for row in rewrites)
    return got, " ".join(row.detail for row in rewrites)


def same(got, want):
    got, want = ([v] if isinstance(v, torch.Tensor) else v for v in (got, want))
    for a, b in zip(got, want, strict=True):
        # Sums over at most T decayed products, in another order.
        assert (a - b).norm() <= T * torch.finfo(a.dtype).eps * b.norm()


@pytest.mark.parametrize(
    ("fn", "operator"),
    [
        (loop, "selective_scan"),
        (loop_and_state, "selective_scan"),
        (loop_with_another_last_step, "selective_scan"),
        (loop_of_the_middle, "selective_scan"),
        (call, "selective_scan"),
        (call_one_decay, "ssd"),
    ],
    ids=lambda v: getattr(v, "__name__", v),
)
def test_states_are_not_written(fn, operator):
    with torch.no_grad():
        got, details = compiled(fn, tensors())
        same(got, fn(*tensors()))
    assert f"as one {operator}" in details


@pytest.mark.parametrize("fn", [states_read_otherwise, against_time, decays_of_no_known_form])
def test_states_that_are_needed_are_kept(fn):
    with torch.no_grad():
        got, details = compiled(fn, tensors())
        same(got, fn(*tensors()))
    assert "as one selective_scan" not in details
    assert "as one ssd" not in details


def test_states_are_not_written_in_training():
    """A scan that was called: the operator that takes its place brings its own backward."""
    inputs = [x.requires_grad_() for x in tensors()]
    got, details = compiled(call, inputs)
    assert "selective_scan" in details
    want = call(*inputs)
    same(torch.autograd.grad(got.square().sum(), inputs), torch.autograd.grad(want.square().sum(), inputs))


def retention(q, k, v, decay, state):
    """Decays are an argument: one per head, of any sign."""
    ys = []
    for t in range(q.shape[2]):
        state = decay.view(1, -1, 1, 1) * state + k[:, :, t].unsqueeze(-1) @ v[:, :, t].unsqueeze(-2)
        ys.append((q[:, :, t].unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(ys, 2), state


def read_first(q, k, v, decay, state):
    """Decays are an argument: one per head and step, of any sign. The state before the step is read."""
    ys = []
    for t in range(q.shape[2]):
        ys.append((q[:, :, t, :, None] * state).sum(-2))
        state = decay[:, :, t, None, None] * state + k[:, :, t, :, None] * v[:, :, t, None]
    return torch.stack(ys, 2), state


def heads():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, 4, T, 8, generator=g) for _ in range(3))
    return q, k, v, torch.randn(B, 4, 8, 8, generator=g)


def signed_decays(timed):
    decay = torch.tensor([0.9, -0.8, 0.0, -1.01])
    if timed:
        flips = torch.randn(B, 4, T, generator=torch.Generator().manual_seed(1)).sign()
        decay = decay[:, None] * flips
        decay[:, :, T // 2] = 0
    return decay


@pytest.mark.parametrize(("fn", "timed"), [(retention, False), (read_first, True)])
def test_decays_of_any_sign_become_products(fn, timed):
    *projections, state = heads()
    inputs = (*projections, signed_decays(timed), state)
    with torch.no_grad():
        got, details = compiled(fn, inputs)
        same(got, fn(*inputs))
    assert "as one ssd" in details


def test_decays_of_any_sign_keep_their_gradients():
    """Also at zero, where their logarithm has none."""
    *projections, state = heads()
    inputs = [x.requires_grad_() for x in (*projections, signed_decays(False), state)]
    got, details = compiled(retention, inputs)
    assert "ssd" not in details
    want = retention(*inputs)
    found, expected = (torch.autograd.grad(sum(y.square().sum() for y in ys), inputs) for ys in (got, want))
    assert expected[3][2] != 0
    same(found, expected)
