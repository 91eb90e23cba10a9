"""Loops with a decay for each key: one operator, for weak, strong and absent decay, and for any length."""

import pytest
import torch

import refold
from refold.compiler.recurrence import duality
from refold.compiler.recurrence.forms import FEW
from support.scans import compiled, names, operators, spliced
from support.trained import inferred, trained

pytestmark = pytest.mark.rows(16)

CHUNK = FEW
H, K, V = 2, 4, CHUNK


def gated(decay):
    """Return gated linear attention by broadcasting; ``decay`` is called with the gates and the values of a step."""

    def fn(q, k, v, gate, state=None):
        s = torch.zeros(q.shape[0], H, K, v.shape[-1], dtype=q.dtype) if state is None else state
        out = torch.zeros_like(v)
        for t in range(q.shape[1]):
            s = s * decay(gate[:, t, ..., None], v[:, t, :, None]) + k[:, t, :, :, None] * v[:, t, :, None, :]
            out[:, t] = (q[:, t, :, :, None] * s).sum(-2)
        return out

    return fn


attention = gated(lambda gate, v: gate.sigmoid())  # one gate a key


def attention_by_products(q, k, v, gate, state=None):
    """The same, its outer product and contraction spelled as matrix products, with exponentials as gates."""
    s = torch.zeros(q.shape[0], H, K, v.shape[-1], dtype=q.dtype) if state is None else state
    out = []
    for t in range(q.shape[1]):
        decay = torch.exp(-torch.nn.functional.softplus(-gate[:, t]))
        s = decay.unsqueeze(-1) * s + k[:, t].unsqueeze(-1) @ v[:, t].unsqueeze(-2)
        out.append((q[:, t].unsqueeze(-2) @ s).squeeze(-2))
    return torch.stack(out, 1)


def attention_with_roots(q, k, v, gate, state=None):
    """Its gates, roots of sigmoids, are computed before the loop."""
    s = torch.zeros(q.shape[0], H, K, v.shape[-1], dtype=q.dtype) if state is None else state
    gates, out = gate.sigmoid() ** (1 / 16), []
    for t in range(q.shape[1]):
        s = s * gates[:, t][..., None] + k[:, t, :, :, None] * v[:, t, :, None, :]
        out.append((q[:, t, :, :, None] * s).sum(-2))
    return torch.stack(out, 1)


def inputs(steps, strength=1.0, v=V, dtype=torch.float32):
    g = torch.Generator().manual_seed(steps)
    q, k = (torch.randn(2, steps, H, K, generator=g, dtype=dtype) for _ in range(2))
    x, gate = torch.randn(2, steps, H, v, generator=g, dtype=dtype), torch.randn(q.shape, generator=g, dtype=dtype)
    return q, k, x, strength * gate


def close(got, want, steps):
    # Sums over at most all steps and keys, in another order, of products that are rounded a few times.
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert (a - b).norm() <= 4 * K * steps**0.5 * torch.finfo(a.dtype).eps * b.norm()


def agree(run, fn, *state):
    steps = 2 * CHUNK + 5
    leaves = [x.requires_grad_() for x in (*inputs(steps), *state)]
    got, want = run(*leaves), fn(*leaves)
    close([got], [want], steps)
    close(torch.autograd.grad(got.sum(), leaves), torch.autograd.grad(want.sum(), leaves), steps)


@pytest.mark.parametrize("fn", [attention, attention_by_products, attention_with_roots])
def test_values_and_gradients(fn):
    run, report = spliced(fn, "training")
    agree(run, fn)
    agree(run, fn, torch.ones(2, H, K, V))
    assert names(report.rewrites) == ["delta_rule"] * 2


def test_training():
    run = compiled(attention_with_roots)
    agree(run, attention_with_roots, torch.ones(2, H, K, V))
    assert operators(run) == ["delta_rule"]


def applied_in_float64(strength):
    args = inputs(2 * CHUNK + 5, strength, dtype=torch.float64)
    torch._dynamo.reset()
    run = refold.compile(attention, accept="always", strict=True)
    with torch.no_grad():
        close([run(*args)], [attention(*args)], 2 * CHUNK + 5)
    return [row.detail.split(" as ")[1] for row in run.report.graphs[0].applied]


@pytest.mark.parametrize("strength", [0.1, 5.0, 50.0])
def test_float64_is_no_less_exact(strength):
    """It has no wider type to sum log decays in, and strong ones are next to weak ones."""
    assert applied_in_float64(strength) == ["one delta_rule"]


def test_wrong_float64_is_refused(monkeypatch):
    """A gate that is wrong by 1e-10 of its logarithm is seen; the states are kept instead."""
    right = duality.logarithm

    def wrong(emit, term):
        return emit.call(torch.ops.aten.mul.Tensor, right(emit, term), 1 + 1e-10)

    monkeypatch.setattr(duality, "logarithm", wrong)
    assert applied_in_float64(1.0) == ["one linear_scan"]


def sequential(q, k, v, logs, state):
    out = []
    for t in range(q.shape[1]):
        state = state * logs[:, t, :, None].exp() + k[:, t, :, None] * v[:, t, None, :]
        out.append((q[:, t, :, None] * state).sum(1))
    return torch.stack(out, 1), state


def by_operator(q, k, v, logs, state):
    """Run the loop as the operator that it becomes."""
    torch._dynamo.reset()
    run, report = spliced(sequential)
    got = run(q, k, v, logs, state)
    assert names(report.rewrites) == ["delta_rule"]
    return got


@pytest.mark.parametrize("steps", [2 * CHUNK, 3 * CHUNK + 1])
@pytest.mark.parametrize("strength", [0.0, 1e-4, 1.0, 50.0], ids=lambda s: f"decay{s}")
def test_lengths_and_strengths(steps, strength):
    q, k, v, gate = (x[:, :, 0] for x in inputs(steps))
    logs, state = -strength * gate.abs(), torch.ones(2, K, V)
    got = by_operator(q, k, v, logs, state)
    want = sequential(*(x.double() for x in (q, k, v, logs, state)))
    close([x.double().float() for x in got], [x.float() for x in want], steps)


def test_growth_and_strong_decay():
    """A decay of e-80 next to growth: the exponentials of sums alone would overflow or vanish."""
    q, k, v, gate = (x[:, :, 0] for x in inputs(2 * CHUNK + 3))
    logs = torch.where(gate > 1, -80.0, 0.3 * gate.abs())
    given = q, k, v, logs, torch.zeros(2, K, V)
    got, want = by_operator(*given), sequential(*(x.double() for x in given))
    assert all(x.isfinite().all() for x in got)
    close(got, [x.float() for x in want], CHUNK + 3)


@pytest.mark.parametrize("at", [[0], [5], [CHUNK], [2, 3, 4, CHUNK + 1], list(range(2 * CHUNK))], ids=str)
def test_a_decay_of_zero_forgets(at):
    q, k, v, gate = (x[:, :, 0] for x in inputs(2 * CHUNK + 3))
    logs = (0.5 * gate.abs()).index_fill(1, torch.tensor(at), -torch.inf)  # what it forgets does not grow again
    given = q, k, v, logs, torch.ones(2, K, V)
    got, want = by_operator(*given), sequential(*(x.double() for x in given))
    close(got, [x.float() for x in want], 2 * CHUNK)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which", range(4), ids=["query", "key", "value", "decay"])
def test_what_is_not_finite_stays_in_its_time_and_channel(which, bad):
    """Padding after 20 steps, in all channels or in one; results and gradients that eager has stay as they are."""
    given = [x[:, :, 0].clone() for x in inputs(2 * CHUNK + 3)]
    given[3] = -given[3].abs()
    for channels in (slice(None), slice(1, 2)):
        args = [x.clone() for x in given]
        args[which][:, 20:, channels] = bad
        runs = []
        for scan in (sequential, by_operator):
            leaves = [x.clone().requires_grad_() for x in args]
            y, _ = scan(*leaves, torch.zeros(2, K, V))
            gradients = torch.autograd.grad(y[:, :20].sum(), leaves)
            runs.append([y.detach(), *(g[:, :20] for g in gradients)])
        for want, got in zip(*runs, strict=True):
            assert torch.equal(want.isfinite(), got.isfinite())
            close([got.nan_to_num(0, 0, 0)], [want.nan_to_num(0, 0, 0)], 2 * CHUNK)


signed = gated(lambda gate, v: gate.tanh())
along_both = gated(lambda gate, v: gate.sigmoid() * v.sigmoid())


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("fn", "v"), [(signed, V), (along_both, V), (attention, V - 1)], ids=["signed", "both", "narrow"]
)
def test_other_scans_keep_their_states(fn, v):
    args = inputs(2 * CHUNK, v=v)
    torch._dynamo.reset()
    report = refold.explain(fn, *args)
    assert [row.detail.split(" as ")[1] for graph in report.graphs for row in graph.rewrites] == ["one linear_scan"]


def masked(form):
    """Return linear attention whose steps a mask leaves out."""

    def fn(q, k, v, gate, mask):
        taken, a, out = mask > 0, gate[..., :1, None].sigmoid(), []
        s = torch.zeros(q.shape[0], H, K, V, dtype=q.dtype)
        for t in range(q.shape[1]):
            before, start = s, s * a[:, t] if form == "decayed" else s
            new = (start if form == "decayed" else s * a[:, t]) + k[:, t, ..., None] * v[:, t, :, None]
            inner = torch.where(a[:, t] > 0.4, new, start) if form == "nested" else new
            s = torch.where(taken[:, t], inner, start)
            out.append((q[:, t, ..., None] * (before if form == "before" else s)).sum(-2))
        return torch.stack(out, 1)

    return fn


@pytest.mark.parametrize("form", ["after", "before", "decayed", "nested", "elements"])
def test_steps_that_a_mask_leaves_out(form):
    fn, mask = masked(form), torch.randn(2, CHUNK + 3, *((H, K, V) if form == "elements" else (1, 1, 1)))
    for run, given in ((inferred, inputs(CHUNK + 3)), (trained, [x.requires_grad_() for x in inputs(CHUNK + 3)])):
        report, error = run(fn, *given, mask)
        assert names(report.rewrites) == ["linear_scan" if form == "elements" else "ssd"]
        assert error < 8
    given, results = inputs(CHUNK + 3), []
    given[2][(mask <= 0).all((2, 3, 4))] = torch.nan
    inferred(fn, *given, mask, results=results)
    close(results, [fn(*given, mask)], CHUNK + 3)


def test_what_a_loop_became_is_no_loop():
    torch._dynamo.reset()
    (graph,) = refold.explain(attention_by_products, *inputs(2 * CHUNK)).graphs
    assert len(graph.loops) == 1
