"""Unrolled loops over time become scans in every spelling; loops that are not scans stay as they are."""

from random import Random

import pytest
import torch

import refold
from support.layers import LAYERS, Sizes

pytestmark = pytest.mark.rows(16)

SCAN = "refold.linear_scan.default"
T, B, D, N = 7, 2, 5, 3


def ema_walrus(x, a):
    h = torch.zeros(x.shape[0], x.shape[2])
    return torch.cat([(h := h * a + (1.0 - a) * xt).unsqueeze(0) for xt in x.unbind(1)]).transpose(0, 1)


def ema_views_made_anew(x, a):
    h, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = a * h + (1 - a) * x.transpose(0, 1)[t]
        out.append(h)
    return torch.stack(out, dim=1)


def last_state_only(x, w):
    h, hs = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = torch.sigmoid(x[:, t] @ w) * h + x[:, t] * w[0]
        hs.append(h)
    return torch.stack(hs, 1), h, h * 2


def reverse_negative_index(x, w):
    h, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
    for t in range(1, x.shape[1] + 1):
        h = w[0] * h + x[:, -t]
        out[:, -t] = h
    return out


def two_carries(x, w):
    h, g, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = w[0] * h + x[:, t]
        g = (1 - w[0]) * g + h * x[:, t]
        out.append(h * g)
    return torch.stack(out, dim=1)


GATES = [(B, T, D), (D, D)]
# What the loops of a layer become: one of `support.layers`, or a function and the shapes of its inputs.
SCANS = {
    "mamba1": ["selective_scan"],
    "mamba1_slow_forward": ["selective_scan"],
    "mamba2_steps": ["ssd"],
    "retention": ["ssd"],
    "normalised_attention": ["linear_scan", "ssd"],
    "gla": ["linear_scan"],
    "hgrn": ["linear_scan"],
    "s4d": ["linear_scan"],
    "min_lstm": ["linear_scan"],
    "gae": ["linear_scan"],
    "macd": ["linear_scan"] * 3,
    "both_ways": ["linear_scan"] * 2,
    "two_layers": ["linear_scan"] * 2,
    (last_state_only, *GATES): ["linear_scan"],
    (reverse_negative_index, *GATES): ["linear_scan"],
    (ema_walrus, (B, T, D), ()): ["linear_scan"],
    (ema_views_made_anew, (B, T, D), ()): ["linear_scan"],
    (two_carries, *GATES): ["linear_scan"] * 2,
}
each = pytest.mark.parametrize("layer", SCANS, ids=lambda layer: layer if isinstance(layer, str) else layer[0].__name__)


def drawn(layer):
    """Draw the inputs of a layer; return it with them."""
    if isinstance(layer, str):
        fn, inputs = LAYERS[layer](Sizes(Random(0), torch.float32, B, T))
        return fn, [x.contiguous() for x in inputs]
    fn, *shapes = layer
    return fn, [torch.randn(shape) for shape in shapes]


@each
def test_models(rewritten, layer):
    fn, inputs = drawn(layer)
    outcome = rewritten(fn, *inputs)
    found = sorted(target for target in outcome.targets if target.startswith("refold."))
    assert found == [f"refold.{name}.default" for name in SCANS[layer]]
    assert len(outcome.targets) < 70
    assert outcome.worst() < 1e-5


@each
def test_gradients(rewritten, layer):
    fn, inputs = drawn(layer)
    outcome = rewritten(fn, *(x.requires_grad_(x.is_floating_point()) for x in inputs))
    assert outcome.targets.count(SCAN) >= 2 * len(SCANS[layer]), "the forward and its backward"
    assert outcome.worst() < 1e-4


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


def ema_preallocated(x, a):
    out, h = torch.empty_like(x), 0.0
    for t in range(x.shape[1]):
        h = a * h + (1 - a) * x[:, t]
        out[:, t] = h
    return out


def ema_time_first(x, a):
    h, out = torch.zeros(x.shape[0], x.shape[2]), []
    for xt in x.transpose(0, 1):
        h = a * h - (a - 1) * xt
        out.append(h)
    return torch.stack(out)


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


AVERAGES = [ema_for, ema_zip, ema_preallocated, ema_time_first, ema_reads_its_output, ema_slices]


@pytest.mark.parametrize("fn", AVERAGES, ids=lambda fn: fn.__name__)
def test_spellings_in_inference(rewritten, fn):
    outcome = rewritten(fn, torch.randn(B, T, D), torch.tensor(0.7))
    assert outcome.names == ["roll up loop"]
    assert outcome.targets.count(SCAN) == 1
    assert outcome.worst() < 1e-5


def test_work_of_a_scan_is_counted_by_its_own_formula(rewritten):
    x, dt, A, B_, C = (torch.rand(shape) for shape in ((B, T, 2, D), (B, T, 2), (2,), (B, T, N), (B, T, N)))

    def mamba2(x, dt, A, B_, C):
        S, ys = torch.zeros(*x[:, 0].shape, N), []
        for t in range(T):
            S = torch.exp(-dt[:, t] * A)[:, :, None, None] * S
            S = S + torch.einsum("bh,bhp,bn->bhpn", dt[:, t], x[:, t], B_[:, t])
            ys.append(torch.einsum("bhpn,bn->bhp", S, C[:, t]))
        return torch.stack(ys, 1)

    (rewrite,) = rewritten(mamba2, x, dt, A, B_, C).rewrites
    tokens, heads = B * T, 2
    scan = 5 * tokens * heads * D * N
    elementwise = tokens * heads * N  # B and C lie as they are; x, dt and A too
    assert scan <= rewrite.after.flops <= scan + 2 * elementwise
    x, y, state = 4 * tokens * heads * D, 4 * tokens * heads * D, 4 * B * heads * D * N
    assert rewrite.after.bytes >= x + y + state + 4 * (tokens * heads + heads + 2 * tokens * N)


@pytest.mark.parametrize("steps", [3, 4, 64])
def test_nodes_do_not_grow_with_the_steps(rewritten, steps):
    fn, inputs = LAYERS["mamba1"](Sizes(Random(0), torch.float32, B, steps))
    outcome = rewritten(fn, *inputs)
    rolled = "refold.selective_scan.default" in outcome.targets
    assert rolled == (steps >= 4)
    assert len(outcome.targets) < 60 or not rolled


def inputs_gates():
    return torch.randn(B, T, D), torch.randn(D, D), torch.randn(D, D)


def over_time(step):
    """Return a loop that collects the state of each step; inputs are `inputs_gates`."""

    def fn(x, w, u):
        h, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = step(h, x[:, t], w, u)
            out.append(h)
        return torch.stack(out, 1)

    return fn


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
    "gru": over_time(lambda h, x, w, u: torch.lerp(x.tanh(), h, torch.sigmoid(x @ w + h @ u))),
    "matrix carry": over_time(lambda h, x, w, u: h @ w + x),
    "normalised": over_time(lambda h, x, w, u: 0.5 * h / h.norm().clamp(min=1) + x),
    "squared": over_time(lambda h, x, w, u: 0.1 * h * h + x),
    "shifted": over_time(lambda h, x, w, u: 0.5 * h.roll(1, -1) + x),
    "two keys": two_keys,
    "fibonacci": fibonacci,
    "no loop": over_time(lambda h, x, w, u: torch.tanh(x @ w)),
    "irregular": irregular,
    "one odd step": one_odd_step,
}


@pytest.mark.parametrize("name", [*NEGATIVES, "lstm_cell", "elman", "oscillator"])
@pytest.mark.parametrize("train", [False, True])
def test_other_loops_stay(rewritten, name, train):
    fn, inputs = (NEGATIVES[name], inputs_gates()) if name in NEGATIVES else drawn(name)
    outcome = rewritten(fn, *(x.requires_grad_(train) for x in inputs))
    if not train:
        assert "roll up loop" not in outcome.names
    assert outcome.worst() < 1e-5


def uneven(x, w, u):
    h, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = w[0] * h + x[:, t * t // 40]
        out.append(h)
    return torch.stack(out, 1)


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="it is captured")
def test_explain_says_where_an_unrolled_loop_ends():
    (graph,) = refold.explain(uneven, torch.randn(2, 24, 4), torch.rand(4, 4), None).graphs
    notes = [note for note in graph.notes if "a loop over time is not rewritten" in note]
    assert any("torch.stack" in note for note in notes)
    for note in notes:  # also where a later list depends on the loop
        assert "(2 x 24 x 4) is read at positions of axis 1 that are not evenly spaced: 0, 0, 1 in" in note
        assert note.count("h = w[0] * h + x[:, t * t // 40]") == 1


def inputs_ema():
    return torch.randn(B, T, D), torch.tensor(0.7)


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
