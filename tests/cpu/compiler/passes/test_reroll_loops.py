"""Unrolled loops over time become scans in every spelling; loops that are not scans stay as they are."""

import pytest
import torch

import refold

pytestmark = pytest.mark.rows(16)

SCAN = "refold.linear_scan.default"
T, B, D, N = 7, 2, 5, 3


def ema_for(x, a):
    h, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = a * h + (1 - a) * x[:, t]
        out.append(h)
    return torch.stack(out, dim=1)


def ema_zip(x, a):
    h, out = x.new_zeros(x.shape[0], x.shape[2]), []
    for at, xt in zip(a.expand_as(x).unbind(1), x.unbind(1), strict=True):
        h = torch.lerp(xt, h, at)
        out += [h]
    return torch.stack(out, 1)


def ema_walrus(x, a):
    h = torch.zeros(x.shape[0], x.shape[2])
    return torch.cat([(h := h * a + (1.0 - a) * xt).unsqueeze(0) for xt in x.unbind(1)]).transpose(0, 1)


def ema_preallocated(x, a):
    out, h = torch.empty_like(x), 0.0
    for t in range(x.shape[1]):
        h = a * h + (1 - a) * x[:, t]
        out[:, t] = h
    return out


def ema_reads_its_output(x, a):
    out = torch.zeros_like(x)
    out[:, 0] = x[:, 0]
    for t in range(1, x.shape[1]):
        out[:, t] = a * out[:, t - 1] + (1 - a) * x[:, t]
    return out


def ema_slices(x, a):
    h, out = torch.zeros(x.shape[0], 1, x.shape[2]), []
    for t in range(x.shape[1]):
        h = h + (1 - a) * (x[:, t : t + 1, :] - h)
        out.append(h)
    return torch.cat(out, dim=1)


def ema_time_first(x, a):
    h, out = torch.zeros(x.shape[0], x.shape[2]), []
    for xt in x.transpose(0, 1):
        h = a * h - (a - 1) * xt
        out.append(h)
    return torch.stack(out)


def ema_views_made_anew(x, a):
    h, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = a * h + (1 - a) * x.transpose(0, 1)[t]
        out.append(h)
    return torch.stack(out, dim=1)


SPELLINGS = [
    ema_for, ema_zip, ema_walrus, ema_preallocated, ema_reads_its_output, ema_slices, ema_time_first,
    ema_views_made_anew,
]  # fmt: skip


@pytest.mark.parametrize("fn", SPELLINGS, ids=lambda fn: fn.__name__)
def test_spellings(rewritten, fn):
    outcome = rewritten(fn, torch.randn(B, T, D), torch.tensor(0.7))
    assert outcome.names == ["roll up loop"]
    assert outcome.targets.count(SCAN) == 1
    assert outcome.worst() < 1e-5


def mamba1(x, dt, A, B_, C):
    h, ys = torch.zeros(x.shape[0], x.shape[2], A.shape[1]), []
    for t in range(x.shape[1]):
        decay = torch.exp(dt[:, t, :, None] * A)
        h = decay * h + dt[:, t, :, None] * B_[:, t, None, :] * x[:, t, :, None]
        ys.append((h * C[:, t, None, :]).sum(-1))
    return torch.stack(ys, dim=1) + x


def mamba1_matmul(x, dt, A, B_, C):
    dA = torch.exp(dt.unsqueeze(-1) * A)
    dBx = (dt * x).unsqueeze(-1) * B_.unsqueeze(2)
    h, y = torch.zeros_like(dA[:, 0]), torch.empty_like(x)
    for i in range(x.size(1)):
        h = dA[:, i] * h + dBx[:, i]
        y[:, i, :] = (h @ C[:, i, :].unsqueeze(-1)).squeeze(-1)
    return y, h


def inputs_mamba1():
    return torch.randn(B, T, D), torch.rand(B, T, D), -torch.rand(D, N), torch.randn(B, T, N), torch.randn(B, T, N)


def mamba2(x, dt, A, B_, C):
    S, ys = torch.zeros(*x[:, 0].shape, B_.shape[-1]), []
    for t in range(x.shape[1]):
        S = torch.exp(dt[:, t] * A)[:, :, None, None] * S
        S = S + torch.einsum("bh,bhp,bn->bhpn", dt[:, t], x[:, t], B_[:, t])
        ys.append(torch.einsum("bhpn,bn->bhp", S, C[:, t]))
    return torch.stack(ys, 1)


def inputs_mamba2():
    return torch.randn(B, T, 2, D), torch.rand(B, T, 2), -torch.rand(2), torch.randn(B, T, N), torch.randn(B, T, N)


def linear_attention(q, k, v):
    S, out = q.new_zeros(q.shape[0], q.shape[1], q.shape[-1], v.shape[-1]), []
    for t in range(q.shape[2]):
        S = S + k[:, :, t].unsqueeze(-1) * v[:, :, t].unsqueeze(-2)
        out.append((q[:, :, t].unsqueeze(-2) @ S).squeeze(-2))
    return torch.stack(out, dim=2)


def retnet(q, k, v):
    gamma = 1 - 2.0 ** (-5 - torch.arange(q.shape[1]))
    S, out = 0, []
    for t in range(q.shape[2]):
        S = gamma[:, None, None] * S + k[:, :, t, :, None] @ v[:, :, t, None, :]
        out.append(torch.einsum("bhn,bhnp->bhp", q[:, :, t], S))
    return torch.stack(out, dim=2)


def attention(q, k, v, decay, write=lambda t: 1.0):
    """Attend linearly; ``decay`` broadcasts against states (batch, heads, N, D)."""
    S, out = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
    for t in range(q.shape[2]):
        S = decay(t) * S + write(t) * k[:, :, t, :, None] * v[:, :, t, None, :]
        out.append((q[:, :, t, :, None] * S).sum(-2))
    return torch.stack(out, dim=2)


def learned_retention(q, k, v):
    return attention(q, k, v, lambda t: torch.sigmoid(q.mean((0, 2, 3)))[:, None, None])


def gated_attention(q, k, v):
    return attention(q, k, v, lambda t: torch.sigmoid(q[:, :, t, 0])[:, :, None, None] * 0.9)


def exponential_gates(q, k, v):
    forget, write = torch.nn.functional.logsigmoid(q.sum(-1)), torch.exp(k.sum(-1))
    return attention(q, k, v, lambda t: torch.exp(forget[:, :, t, None, None]), lambda t: write[:, :, t, None, None])


def gated_keys(q, k, v):
    return attention(q, k, v, lambda t: torch.sigmoid(q[:, :, t, :, None]))


def signed_decay(q, k, v):
    return attention(q, k, v, lambda t: torch.tanh(q[:, :, t, 0])[:, :, None, None])


def inputs_attention():
    return torch.randn(B, 2, T, N), torch.randn(B, 2, T, N), torch.randn(B, 2, T, D)


def min_gru(x, w, u):
    h, hs = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        z = torch.sigmoid(x[:, t] @ w)
        h = (1 - z) * h + z * torch.tanh(x[:, t] @ u)
        hs.append(h)
    return torch.stack(hs, 1)


def last_state_only(x, w, u):
    h, hs = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = torch.sigmoid(x[:, t] @ w) * h + x[:, t] @ u
        hs.append(h)
    return torch.stack(hs, 1), h, h * 2


def inputs_gates():
    return torch.randn(B, T, D), torch.randn(D, D), torch.randn(D, D)


def s4d_real(u, log_dt, A, B_, C):
    dt = torch.exp(log_dt)
    dA, dB = torch.exp(dt[:, None] * A), dt[:, None] * B_
    x, ys = torch.zeros(u.shape[0], *A.shape), []
    for t in range(u.shape[-1]):
        x = dA * x + dB * u[:, :, t, None]
        ys.append((C * x).sum(-1))
    return torch.stack(ys, dim=-1)


def inputs_s4d():
    return torch.randn(B, D, T), torch.randn(D), -torch.rand(D, N), torch.randn(D, N), torch.randn(D, N)


def reverse(x, a):
    h, out = torch.zeros_like(x[:, 0]), []
    for t in reversed(range(x.shape[1])):
        h = a * h + x[:, t]
        out.append(h)
    return torch.stack(out[::-1], dim=1)


def reverse_negative_index(x, a):
    h, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
    for t in range(1, x.shape[1] + 1):
        h = a * h + x[:, -t]
        out[:, -t] = h
    return out


def bidirectional(x, a):
    return torch.cat([ema_for(x, a), reverse(x, a)], -1)


def two_carries(x, a):
    h, g, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = a * h + x[:, t]
        g = (1 - a) * g + h * x[:, t]
        out.append(h * g)
    return torch.stack(out, dim=1)


def two_layers(x, a):
    return ema_for(torch.tanh(ema_for(x, a)), a)


def inputs_ema():
    return torch.randn(B, T, D), torch.tensor(0.7)


SCANS = [
    (mamba1, inputs_mamba1, 1, "selective_scan"),
    (mamba1_matmul, inputs_mamba1, 2, "selective_scan"),
    (mamba2, inputs_mamba2, 1, "ssd"),
    (linear_attention, inputs_attention, 1, "ssd"),
    (retnet, inputs_attention, 1, "ssd"),
    (learned_retention, inputs_attention, 1, "ssd"),
    (gated_attention, inputs_attention, 1, "ssd"),
    (exponential_gates, inputs_attention, 1, "ssd"),
    (gated_keys, inputs_attention, 1, 1),
    (signed_decay, inputs_attention, 1, "ssd"),
    (min_gru, inputs_gates, 1, 1),
    (last_state_only, inputs_gates, 2, 1),
    (s4d_real, inputs_s4d, 1, 1),
    (reverse, inputs_ema, 1, 1),
    (reverse_negative_index, inputs_ema, 1, 1),
    (bidirectional, inputs_ema, 2, 2),
    (two_carries, inputs_ema, 1, 2),
    (two_layers, inputs_ema, 2, 2),
]


@pytest.mark.parametrize(("fn", "inputs", "rewrites", "scans"), SCANS, ids=[case[0].__name__ for case in SCANS])
def test_models(rewritten, fn, inputs, rewrites, scans):
    outcome = rewritten(fn, *inputs())
    assert outcome.names.count("roll up loop") == rewrites
    if isinstance(scans, str):
        assert SCAN not in outcome.targets
        assert outcome.targets.count(f"refold.{scans}.default") == 1
    else:
        assert outcome.targets.count(SCAN) == scans
    assert len(outcome.targets) < 60
    assert outcome.worst() < 1e-5


def test_work_of_a_scan_is_counted_by_its_own_formula(rewritten):
    tokens, heads = B * T, 2
    (rewrite,) = rewritten(mamba2, *inputs_mamba2()).rewrites
    scan = 5 * tokens * heads * D * N
    elementwise = tokens * heads * N  # B and C lie as they are; x, dt and A too
    assert scan <= rewrite.after.flops <= scan + 2 * elementwise
    x, y, state = 4 * tokens * heads * D, 4 * tokens * heads * D, 4 * B * heads * D * N
    assert rewrite.after.bytes >= x + y + state + 4 * (tokens * heads + heads + 2 * tokens * N)


@pytest.mark.parametrize(
    ("fn", "inputs", "rewrites", "scans"), SCANS[::-1], ids=[case[0].__name__ for case in SCANS[::-1]]
)
def test_gradients(rewritten, fn, inputs, rewrites, scans):
    outcome = rewritten(fn, *(x.requires_grad_() for x in inputs()))
    forward = 1 if isinstance(scans, str) else scans
    assert outcome.targets.count(SCAN) >= 2 * forward, "the forward and its backward"
    assert outcome.worst() < 1e-4


@pytest.mark.parametrize("steps", [3, 4, 64])
def test_nodes_do_not_grow_with_the_steps(rewritten, steps):
    inputs = [x[:, :1].expand(-1, steps, -1).contiguous() if x.dim() == 3 else x for x in inputs_mamba1()]
    outcome = rewritten(mamba1, *inputs)
    assert ("refold.selective_scan.default" in outcome.targets) == (steps >= 4)
    assert len(outcome.targets) < 60


def over_time(step):
    """Return a loop that collects the state of each step; inputs are `inputs_gates`."""

    def fn(x, w, u):
        h, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = step(h, x[:, t], w, u)
            out.append(h)
        return torch.stack(out, 1)

    return fn


def lstm(x, w, u):
    h, c, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        gate = torch.sigmoid(x[:, t] @ w + h @ u)
        c = gate * c + (1 - gate) * torch.tanh(x[:, t])
        h = gate * torch.tanh(c)
        out.append(h)
    return torch.stack(out, 1)


def coupled(x, w, u):
    re, im, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        re, im = 0.9 * re - 0.1 * im + x[:, t], 0.1 * re + 0.9 * im
        out.append(re)
    return torch.stack(out, 1)


def fibonacci(x, w, u):
    h, g, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h, g = h + g + x[:, t], h
        out.append(h)
    return torch.stack(out, 1)


def two_keys(x, w, u):
    S, out = torch.zeros(B, D, D), []
    for t in range(x.shape[1]):
        k = x[:, t]
        S = S + k[:, :, None] * k[:, None, :] - (u[0] * k)[:, :, None] * (S * k[:, :, None]).sum(1, keepdim=True)
        out.append(S.sum(1))
    return torch.stack(out, 1)


def irregular(x, w, u):
    h, out = torch.zeros_like(x[:, 0]), []
    for t in (0, 1, 3, 2, 6, 5, 4):
        h = 0.5 * h + x[:, t]
        out.append(h)
    return torch.stack(out, 1)


def one_odd_step(x, w, u):
    h, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = w[0] * h + (torch.exp(x[:, t]) if t == x.shape[1] // 2 else torch.tanh(x[:, t]))
        out.append(h)
    return torch.stack(out, 1)


NEGATIVES = {
    "lstm": lstm,
    "gru": over_time(lambda h, x, w, u: torch.lerp(x.tanh(), h, torch.sigmoid(x @ w + h @ u))),
    "vanilla": over_time(lambda h, x, w, u: torch.tanh(x @ w + h @ u)),
    "matrix carry": over_time(lambda h, x, w, u: h @ w + x),
    "normalised": over_time(lambda h, x, w, u: 0.5 * h / h.norm().clamp(min=1) + x),
    "squared": over_time(lambda h, x, w, u: 0.1 * h * h + x),
    "shifted": over_time(lambda h, x, w, u: 0.5 * h.roll(1, -1) + x),
    "coupled": coupled,
    "two keys": two_keys,
    "fibonacci": fibonacci,
    "no loop": over_time(lambda h, x, w, u: torch.tanh(x @ w)),
    "irregular": irregular,
    "one odd step": one_odd_step,
}


@pytest.mark.parametrize("name", NEGATIVES)
@pytest.mark.parametrize("train", [False, True])
def test_other_loops_stay(rewritten, name, train):
    outcome = rewritten(NEGATIVES[name], *(x.requires_grad_(train) for x in inputs_gates()))
    if not train:
        assert "roll up loop" not in outcome.names
    assert outcome.worst() < 1e-5


REASONS = {
    "two keys": "mixes elements",
    "gru": "mixes elements",
    "squared": "by itself",
    "normalised": "not affine",
}


@pytest.mark.parametrize("name", REASONS)
def test_explain_says_why_a_loop_stays(name):
    x, w, u = inputs_gates()
    (graph,) = refold.explain(NEGATIVES[name], torch.cat([x, x], 1), w, u).graphs
    assert any("a loop over time is not rewritten" in note and REASONS[name] in note for note in graph.notes)


def uneven(x, w, u):
    h, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = w[0] * h + x[:, t * t // 40]
        out.append(h)
    return torch.stack(out, 1)


UNROLLED = [
    pytest.param(
        uneven,
        "h = w[0] * h + x[:, t * t // 40]",
        "(2 x 24 x 4) is read at positions of axis 1 that are not evenly spaced: 0, 0, 1 in",
        id="uneven",
        marks=pytest.mark.skipif(torch.__version__ < (2, 13), reason="it is captured"),
    ),
    pytest.param(
        one_odd_step,
        "else torch.tanh(x[:, t]))",
        "step 12, counted from 0, computes `torch.exp(x[:, t])`, and the step before it computes `torch.tanh(x[:, t])`",
        id="one_odd_step",
    ),
]


@pytest.mark.parametrize(("fn", "line", "words"), UNROLLED)
def test_explain_says_where_an_unrolled_loop_ends(fn, line, words):
    (graph,) = refold.explain(fn, torch.randn(2, 24, 4), torch.rand(4, 4), None).graphs
    notes = [note for note in graph.notes if "a loop over time is not rewritten" in note]
    assert any("torch.stack" in note for note in notes)
    for note in notes:  # also where a later list depends on the loop
        assert words in note
        assert note.count(line) == 1


def step_with_another_rank(x, a):
    """A slice of one step keeps its axis, which the carry drops: a multiplication between them adds it again."""
    h, out, a = torch.zeros_like(x[:, 0]), [], a.expand_as(x).transpose(0, 1)
    for xt, at in zip(x.transpose(0, 1).split(1), a.split(1), strict=True):
        h = (xt + at * h).view(h.shape)
        out.append(h)
    return torch.stack(out, 1)


def squeezed_carry(x, a):
    h, out = x.new_zeros(x.shape[0], 1, x.shape[2]), []
    for t in range(x.shape[1]):
        h = torch.where(x[:, t] > 0, a * h.squeeze(1) + x[:, t], h.squeeze(1)).unsqueeze(1)
        out.append(h)
    return torch.cat(out, 1)


def wide_as_long(x, a):
    """Another axis before the state is as long as the loop."""
    h, out, w = torch.zeros_like(x[:, 0]), [], torch.arange(float(x.shape[1])).view(-1, 1, 1)
    for t in range(x.shape[1]):
        out.append((w * h).amax(0))
        h = a * h + x[:, t]
    return torch.stack(out, 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("fn", [step_with_another_rank, squeezed_carry, wide_as_long], ids=lambda fn: fn.__name__)
def test_axes_of_size_one_come_and_go(rewritten, fn):
    outcome = rewritten(fn, *inputs_ema())
    assert outcome.targets.count(SCAN) == 1
    assert outcome.worst() < T * torch.finfo(torch.float32).eps
    outcome = rewritten(fn, *(x.requires_grad_() for x in inputs_ema()))
    assert SCAN in outcome.targets
    assert outcome.worst() < T**2 * torch.finfo(torch.float32).eps


@pytest.mark.exhaustive
def test_a_loop_in_two_dtypes_learns():
    """The state is float32, the rest bfloat16: the proof differentiates the conversions of the loop itself."""

    def layer(x, a):
        h, out = torch.zeros(x[:, 0].shape), torch.zeros_like(x)
        for t in range(x.shape[1]):
            h = a[:, t].float() * h + x[:, t].float()
            out[:, t] = h.to(x.dtype)
        return out

    x, a = (torch.rand(2, 20, 3, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    run = refold.compile(layer, accept="always", strict=True)
    got, want = (torch.autograd.grad(fn(x, a).float().sum(), (x, a)) for fn in (run, layer))
    assert "one linear_scan" in run.report.graphs[0].rewrites[0].detail
    for g, w in zip(got, want, strict=True):
        assert (g - w).float().norm() <= 2 * torch.finfo(torch.bfloat16).eps * w.float().norm()


@pytest.mark.exhaustive
@pytest.mark.codegen
def test_what_each_step_computes_anew_is_no_input_of_the_proof():
    """``1 - a`` is a node of every step; drawn for the first one, it would contradict the others' ``a``."""
    x, a = (x.requires_grad_() for x in inputs_ema())
    run = refold.compile(ema_walrus, accept="always", strict=True)
    got, want = (torch.autograd.grad(fn(x, a).square().sum(), (x, a)) for fn in (run, ema_walrus))
    (report,) = run.report.graphs
    assert len(report.applied) == len(report.rewrites) > 1
    for g, w in zip(got, want, strict=True):
        assert (g - w).norm() <= T**2 * torch.finfo(torch.float32).eps * w.norm()


def test_blocks_that_read_the_same_part_of_a_table(rewritten):
    """Lightning attention: each block has the slice of the decays that has its length."""

    def fn(x, decays):
        h, out = torch.zeros(B, D), []
        for start in range(0, 24, 4):
            block = x[:, start : min(start + 4, 24)]
            out.append(block * decays[:4] + h.unsqueeze(1))
            h = 0.5 * h + (block * decays[-4:]).sum(1)
        return torch.cat(out, 1)

    outcome = rewritten(fn, torch.randn(B, 24, D), torch.rand(9, 1))
    assert "roll up loop" in outcome.names
    assert outcome.worst() < 1e-6


def test_a_sum_of_matrices_over_time_is_contracted(rewritten):
    def fn(q, k, v):
        states = (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(2)
        return torch.einsum("bhtd,bhtde->bhte", q, states)

    outcome = rewritten(fn, *torch.randn(3, 2, 3, 24, 8).unbind(0))
    assert "refold.ssd.default" in outcome.targets
    assert outcome.worst() < 1e-5
