"""Layers of the literature, with their recurrence as a plain Python loop."""

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import refold

pytestmark = pytest.mark.rows(16)

EXAMPLES = Path(__file__).parents[4] / "examples"
SCAN, SELECTIVE = "refold.linear_scan.default", "refold.selective_scan.default"
T, B, D, N = 12, 2, 5, 3


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def language_model(name):
    torch.manual_seed(0)
    source = example(name)
    return source.Model(layers=2, width=16, state=3, vocabulary=11).eval(), source.get_inputs(2, T, 11)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["fused_mamba", "fused_mamba1"])
def test_language_models_never_write_their_states(rewritten, name):
    model, inputs = language_model(name)
    with torch.no_grad():
        outcome = rewritten(model, *inputs)
    assert outcome.targets.count(SELECTIVE) == 2
    assert SCAN not in outcome.targets
    assert outcome.worst() < 1e-5
    states = 2 * T * 16 * 3
    assert max(rewrite.after.largest for rewrite in outcome.rewrites) < 4 * states


@pytest.mark.parametrize("name", ["fused_mamba", "fused_mamba1"])
def test_language_models_train(rewritten, name):
    model, inputs = language_model(name)
    outcome = rewritten(model.train(), *inputs)
    assert outcome.targets.count(SCAN) >= 4, "two layers, forward and backward"
    assert outcome.worst() < 1e-4


@pytest.mark.exhaustive  # test_language_models_never_write_their_states compares the graph that this makes code of
@pytest.mark.codegen
def test_language_model_end_to_end():
    model, inputs = language_model("fused_mamba")
    compiled = torch.compile(model, backend="refold", options={"accept": "always", "strict": True}, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs), model(*inputs))


def factors_outside_the_exponential(x, f, A, B_, C):
    """Decays may be of either sign, zero and above one."""
    h, ys = torch.zeros(x.shape[0], x.shape[2], A.shape[1]), []
    for t in range(x.shape[1]):
        h = torch.exp(A) * f[:, t, :, None] * h + x[:, t, :, None] * B_[:, t, None, :]
        ys.append((h * C[:, t, None, :]).sum(-1))
    return torch.stack(ys, 1)


def factors_and_steps(x, f, A, B_, C):
    dt = F.softplus(x)
    dtx = dt * x
    h, ys = torch.zeros(x.shape[0], x.shape[2], A.shape[1]), []
    for t in range(x.shape[1]):
        h = f[:, t, :, None] * (torch.exp(dt[:, t, :, None] * A) * h) + dtx[:, t, :, None] * B_[:, t, None, :]
        ys.append(h @ C[:, t, :, None])
    return torch.cat(ys, -1).mT


def gates_without_exponential(x, f, A, B_, C):
    """xLSTM's and HGRN2's kind: a sigmoid for each channel of a matrix state."""
    h, ys = torch.zeros(x.shape[0], x.shape[2], A.shape[1]), []
    for t, gate in enumerate(torch.sigmoid(f).unbind(1)):
        h = gate[..., None] * h + x[:, t, :, None] * B_[:, t, None, :]
        ys.append(torch.einsum("bdn,bn->bd", h, C[:, t]))
    return torch.stack(ys, 1)


def inputs_selective():
    f = torch.randn(B, T, D) * 1.5
    f[:, 3] = 0.0
    return torch.randn(B, T, D), f, -torch.rand(D, N), torch.randn(B, T, N), torch.randn(B, T, N)


@pytest.mark.exhaustive
@pytest.mark.parametrize("fn", [factors_outside_the_exponential, factors_and_steps, gates_without_exponential])
def test_other_decays_of_selective_scans(rewritten, fn):
    outcome = rewritten(fn, *inputs_selective())
    assert outcome.targets.count(SELECTIVE) == 1
    assert SCAN not in outcome.targets
    assert outcome.worst() < 1e-5


def decaying_by(number):
    """Return linear attention whose decay is a Python number, as a toy RetNet has it."""

    def fn(x, f, A, B_, C):
        h, ys = torch.zeros(x.shape[0], x.shape[2], A.shape[1]), []
        for t in range(x.shape[1]):
            h = number * h + x[:, t, :, None] * B_[:, t, None, :]
            ys.append((h * C[:, t, None, :]).sum(-1))
        return torch.stack(ys, 1)

    return fn


@pytest.mark.exhaustive
@pytest.mark.parametrize(("number", "operator"), [(0.9, "ssd"), (1.0, "ssd"), (1.1, "ssd"), (-0.9, "selective_scan")])
def test_decays_that_are_numbers(rewritten, number, operator):
    outcome = rewritten(decaying_by(number), *inputs_selective())
    assert outcome.targets.count(f"refold.{operator}.default") == 1
    assert SCAN not in outcome.targets
    assert outcome.worst() < T * torch.finfo(torch.float32).eps


def decay_of_state_and_time(x, f, A, B_, C):
    """No factor of the decay is left for time alone: sigmoid of a product is no product."""
    h, ys = torch.zeros(x.shape[0], x.shape[2], A.shape[1]), []
    for t in range(x.shape[1]):
        h = torch.sigmoid(f[:, t, :, None] * A) * h + x[:, t, :, None] * B_[:, t, None, :]
        ys.append((h * C[:, t, None, :]).sum(-1))
    return torch.stack(ys, 1)


@pytest.mark.exhaustive
def test_a_decay_that_is_no_product_stays_a_scan(rewritten):
    outcome = rewritten(decay_of_state_and_time, *inputs_selective())
    assert outcome.targets.count(SCAN) == 1
    assert outcome.worst() < 1e-5


def gated_linear_attention(q, k, v, g):
    S, out = torch.zeros(q.shape[0], q.shape[2], v.shape[2]), []
    for t in range(q.shape[1]):
        S = torch.sigmoid(g[:, t, :, None]) * S + k[:, t, :, None] * v[:, t, None, :]
        out.append(torch.einsum("bk,bkv->bv", q[:, t], S))
    return torch.stack(out, 1)


def hgrn(x, f, lower, o):
    h, hs = torch.zeros_like(x[:, 0]), []
    for xt, ft in zip(F.silu(x).unbind(1), f.unbind(1), strict=True):
        gate = lower + (1 - lower) * torch.sigmoid(ft)
        hs += [h := gate * h + (1 - gate) * xt]
    return torch.stack(hs, 1) * torch.sigmoid(o)


def lru_real(u, log_nu, B_, C):
    decay = torch.exp(-torch.exp(log_nu))
    x, ys = torch.zeros(u.shape[0], log_nu.shape[0]), []
    for t in range(u.shape[1]):
        x = decay * x + torch.sqrt(1 - decay**2) * (u[:, t] @ B_.T)
        ys.append(x @ C.T)
    return torch.stack(ys, 1)


LAYERS = [
    (gated_linear_attention, lambda: tuple(torch.randn(B, T, size) for size in (N, N, D, N))),
    (hgrn, lambda: (torch.randn(B, T, D), torch.randn(B, T, D), torch.rand(D), torch.randn(B, T, D))),
    (lru_real, lambda: (torch.randn(B, T, D), torch.randn(N), torch.randn(N, D), torch.randn(D, N))),
]  # fmt: skip


@pytest.mark.parametrize("case", LAYERS)
@pytest.mark.parametrize("train", [False, True])
def test_layers(rewritten, case, train):
    fn, inputs = case
    outcome = rewritten(fn, *(x.requires_grad_(train) for x in inputs()))
    assert any(target.startswith("refold.") for target in outcome.targets)
    assert len(outcome.targets) < (250 if train else 60)
    assert outcome.worst() < 1e-4


def last_of_a_loop(x, a):
    h = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        h = a * h + x[:, t]
    return torch.tanh(h)


def last_of_long_lines(x, a):
    h = torch.ones_like(x[:, 0])
    for t in range(x.shape[1]):
        h = a * h + x[:, t] * 2 + 1
    return h


def last_of_a_stack(x, a):
    h, hs = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = a * h + x[:, t]
        hs.append(h)
    return torch.stack(hs, 1)[:, -1] @ x[0].T


def last_of_two(x, a):
    h = g = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        h = a * h + x[:, t]
        g = g + (1 - a) * x[:, t]
    return h + g


LAST = [(last_of_a_loop, 1), (last_of_long_lines, 1), (last_of_a_stack, 1), (last_of_two, 2)]


@pytest.mark.parametrize("case", LAST)
@pytest.mark.parametrize("train", [False, True])
def test_loops_of_which_only_the_last_state_is_used(rewritten, case, train):
    (fn, scans), sizes = case, []
    for steps in (T, 2 * T):
        x, a = torch.randn(B, steps, D), torch.rand(D)
        outcome = rewritten(fn, x.requires_grad_(train), a.requires_grad_(train))
        # A sum's gradient needs no scan.
        assert outcome.targets.count(SCAN) >= scans + (train and 1)
        assert outcome.worst() < 1e-4
        sizes.append(len(outcome.targets))
    if not (train and fn is last_of_a_stack):  # whose gradient is a tensor of zeros but for one step
        assert sizes[0] == sizes[1]


def last_of_two_functions(x, a):
    return last_of_a_loop(x, a) + last_of_a_loop(x.flip(1), a)


def test_two_loops_on_one_line(rewritten):
    outcome = rewritten(last_of_two_functions, torch.randn(B, T, D), torch.rand(D))
    assert outcome.targets.count(SCAN) == 2
    assert outcome.worst() < 1e-5


def residual_layers(x, *weights):
    for w in weights:
        x = x + torch.tanh(x @ w)
    return x


def last_gru(x, w, u):
    h = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        z = torch.sigmoid(x[:, t] @ w + h @ u)
        h = (1 - z) * h + z * torch.tanh(x[:, t])
    return h


def overwritten_carry(x, w, u):
    """The list holds one tensor many times: the in-place step changes what was appended before."""
    h, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h.mul_(0.5).add_(x[:, t])
        out.append(h)
    return torch.stack(out, 1)


def later_writes_change_earlier_reads(x, w, u):
    out = x.clone()
    for t in range(1, x.shape[1]):
        out[:, t - 1] = out[:, t] * 0.5
        out[:, t] = out[:, t - 1].sin() + out[:, t]
    return out


def written_twice(x, w, u):
    h, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
    for t in range(x.shape[1]):
        h = 0.5 * h + x[:, t]
        out[:, t] = h
        out[:, t] = out[:, t] * 2 + out[:, (t + 1) % x.shape[1]]
    return out


@pytest.mark.parametrize("fn", [last_gru, overwritten_carry, later_writes_change_earlier_reads, written_twice])
def test_surprises_come_out_right(rewritten, fn):
    outcome = rewritten(fn, torch.randn(B, T, D), torch.randn(D, D), torch.randn(D, D))
    assert outcome.worst() < 1e-5


def test_layers_in_depth_are_no_loop(rewritten):
    outcome = rewritten(residual_layers, torch.randn(B, D), *(torch.randn(D, D) for _ in range(12)))
    assert "roll up loop" not in outcome.names


def test_a_break_that_depends_on_data_leaves_the_result_alone():
    def until_large(x, a):
        h, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = a * h + x[:, t]
            out.append(h)
            if h.abs().max() > 3:
                break
        return torch.stack(out, 1)

    x, a = torch.ones(B, T, D), torch.tensor(0.9)
    torch._dynamo.reset()
    compiled = refold.compile(until_large, accept="always", strict=True)
    torch.testing.assert_close(compiled(x, a), until_large(x, a))
    assert compiled(x, a).shape[1] == 4


def test_explain_says_why_a_loop_without_a_stack_stays():
    report = refold.explain(last_gru, torch.randn(B, T, D), torch.randn(D, D), torch.randn(D, D))
    notes = [note for graph in report.graphs for note in graph.notes]
    assert any("a loop over time is not rewritten" in note and "mixes elements" in note for note in notes)
