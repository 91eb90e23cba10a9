"""Layers of the literature, with their recurrence as a plain Python loop."""

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

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


def selective(decay):
    """Return a selective scan; ``decay`` of a step has the axes (batch, channels, states), and may be of any sign."""

    def fn(x, f, A, B_, C):
        h, ys = torch.zeros(x.shape[0], x.shape[2], A.shape[1]), []
        for t in range(x.shape[1]):
            h = decay(f[:, t, :, None], A) * h + x[:, t, :, None] * B_[:, t, None, :]
            ys.append((h * C[:, t, None, :]).sum(-1))
        return torch.stack(ys, 1)

    return fn


def factors_and_steps(x, f, A, B_, C):
    dt = F.softplus(x)
    dtx = dt * x
    h, ys = torch.zeros(x.shape[0], x.shape[2], A.shape[1]), []
    for t in range(x.shape[1]):
        h = f[:, t, :, None] * (torch.exp(dt[:, t, :, None] * A) * h) + dtx[:, t, :, None] * B_[:, t, None, :]
        ys.append(h @ C[:, t, :, None])
    return torch.cat(ys, -1).mT


def inputs_selective():
    f = torch.randn(B, T, D) * 1.5
    f[:, 3] = 0.0
    return torch.randn(B, T, D), f, -torch.rand(D, N), torch.randn(B, T, N), torch.randn(B, T, N)


DECAYS = {
    "factors outside the exponential": (selective(lambda f, A: torch.exp(A) * f), "selective_scan"),
    "factors and steps": (factors_and_steps, "selective_scan"),
    "no exponential": (selective(lambda f, A: torch.sigmoid(f)), "selective_scan"),  # as in xLSTM and HGRN2
    "all channels alike": (selective(lambda f, A: torch.sigmoid(f[:, :1])), "ssd"),  # by its logarithm
    "all alike, of any sign": (selective(lambda f, A: torch.tanh(f[:, :1])), "ssd"),
    "powers of two, all alike": (selective(lambda f, A: 2 ** f[:, :1]), "ssd"),
    "0.9": (selective(lambda f, A: 0.9), "ssd"),  # numbers, as a toy RetNet has them
    "1.0": (selective(lambda f, A: 1.0), "ssd"),
    "1.1": (selective(lambda f, A: 1.1), "ssd"),
    "-0.9": (selective(lambda f, A: -0.9), "selective_scan"),
    "no product": (selective(lambda f, A: torch.sigmoid(f * A)), "linear_scan"),  # no factor is left for time alone
}


@pytest.mark.rows(6)
@pytest.mark.parametrize("name", DECAYS)
def test_decays_of_selective_scans(rewritten, name):
    fn, operator = DECAYS[name]
    outcome = rewritten(fn, *inputs_selective())
    found = [target for target in outcome.targets if target.startswith("refold.")]
    assert found == [f"refold.{operator}.default"]
    assert outcome.worst() < T * torch.finfo(torch.float32).eps


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
