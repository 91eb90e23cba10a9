"""Each refusal is seen: its text names the variable or the expression, the user's line, and the remedy.

Each program is the smallest one found that is refused for its reason. The rest, which no loop of a user's shows, is
planted: rewrites that are wrong, slow or undescribed, and failures inside refold.
"""

import collections
import inspect
import itertools
import re
import sys

import pytest
import torch

import refold
from refold.compiler.dynamo import captures_loops, notes, to_scan
from refold.compiler.dynamo.capture.lengths import KEEPS_SYMBOLS
from refold.compiler.options import Options
from refold.compiler.recurrence import reroll
from refold.compiler.refusals import REASONS
from refold.compiler.validate import region
from refold.verify.timing import Timing
from support.scans import Described

pytestmark = pytest.mark.rows(16)

T, D = 20, 6


def zero(x):
    return torch.zeros_like(x[0])


# Loops that are not captured ----------------------------------------------------------------------


def deque(x):
    past, ys = collections.deque([zero(x)] * 16, maxlen=16), []
    for t in range(T):
        ys.append(0.5 * past[0] + 0.25 * past[1] + x[t])
        past.append(ys[-1])
    return torch.stack(ys)


def decay_sign(x):
    S, k, out = torch.zeros(3 * D, D), x.repeat(1, 3)[..., None], []
    for t in range(T):
        S = torch.tanh(x[t, 0]) * S
        S = S + k[t] * (x[t] - (S * k[t]).sum(0))
        out.append((S * k[t]).sum(0))
    return torch.stack(out)


def dictionary_keys(x):
    h, seen = zero(x), {}
    for t in range(T):
        h = 0.5 * h + x[t]
        seen[f"step {t}"] = t
    return h + len(seen)


def dynamo(x):
    h, queue = zero(x), set()
    for t in range(T):
        h = 0.5 * h + x[t]
        queue.add(t)
    return h + len(queue)


def early_exit(x):
    h = zero(x)
    for t in range(T):
        h = 0.5 * h + x[t]
        if t < T:
            break
    return h


def first_step(x):
    h = zero(x)
    for t in range(T):
        h = torch.cat([h, x[t]]) if h.shape[0] < 4 * D else 0.5 * h
    return h


def generator(x):
    def states():
        h = zero(x)
        for t in range(T):
            h = 0.5 * h + x[t]
            yield h

    return torch.stack(list(states()))


COUNT = 0


def global_state(x):
    global COUNT
    h = zero(x)
    for t in range(T):
        h = 0.5 * h + x[t]
        COUNT = t
    return h


def higher_order(x):
    h = zero(x)
    for t in range(T):
        h = torch.utils.checkpoint.checkpoint(lambda h, u: torch.tanh(h) + u, h, x[t], use_reentrant=False)
    return h


def hook(x):
    h, ys = zero(x), []
    for t in range(T):
        h = 0.5 * h + x[t]
        ys.append(h * 2)
    h.register_hook(torch.neg)
    return torch.stack(ys) + h


def identity(x):
    h = first = zero(x)
    for t in range(T):
        h = 0.5 * h + (x[t] if h is first else 2 * x[t])
    return h


def list_kind(x):
    h, seen = zero(x), []
    for t in range(T):
        h = 0.5 * h + x[t]
        seen.append((h, "state"))
    return torch.stack([pair[0] for pair in seen])


def list_read(x):
    h, hs = zero(x), []
    for t in range(T):
        h = 0.5 * h + x[t] * len(hs)
        hs.append(h)
    return torch.stack(hs)


def loop_inside(x):
    h = zero(x)
    for t in range(T):
        for k in range(16):
            h = 0.5 * h + x[t] * k
    return h


def mode(x):
    h = zero(x)
    with torch.autocast("cpu"):
        for t in range(T):
            h = 0.5 * h + x[t]
    return h


def outside_change(x):
    h = zero(x)
    for t in range(T):
        u = x[t]
        h = 0.5 * h + u
        del u
    return h


def python_state(x):
    h, w = zero(x), 1.0
    for t in range(T):
        h = w * h + x[t]
        w = 0.9 * w * w
    return h


def sequence_uneven(x):
    h = zero(x)
    for t in [k * k % T for k in range(T)]:
        h = 0.5 * h + x[t]
    return h


def sequence_unknown(x):
    h = zero(x)
    for u in (x[t] for t in range(T)):
        h = 0.5 * h + u
    return h


def size_unknown(x):
    out, h = torch.zeros(2 * x.shape[0], D), zero(x)
    for t in range(x.shape[0]):
        h = 0.5 * h + x[t]
        out[t] = h
    return out


def state_unstable(x):
    h = zero(x)
    for t in range(T):
        h = torch.cat([h, x[t]])
    return h


def step_number(x):
    h = zero(x)
    for t in range(T):
        h = (0.5 if t % 2 == 0 else 0.25) * h + x[t]
    return h


def carry_shape(x):
    h = zero(x)
    for t in range(T):
        h = 0.5 * h + x[: t + 1].sum(0)
        tail = x[t:]
    return h + tail.sum(0)


# Captured loops that are no scans -----------------------------------------------------------------


def carries_coupled(x):
    a = b = zero(x)
    for t in range(T):
        a, b = torch.where(x[t] > 0, x[t], b), a + b
    return a


def carry_dtype(x):
    n = x[0].long()
    for t in range(T):
        n = 2 * n + x[t].long()
    return n


def carry_not_affine(x):
    level = zero(x)
    for t in range(T):
        level = torch.sigmoid(level) + x[t]
    return level


def carry_not_tensor(x, scale=0.5):
    h = zero(x)
    for t in range(T):
        h = scale * h + x[t]
    return h


def carry_squared(x):
    level = zero(x)
    for t in range(T):
        level = level * level + x[t]
    return level


def complex_as_real(x):
    h = x.new_zeros(D, 2)
    for t in range(T):
        h = torch.view_as_real(0.5j * torch.view_as_complex(h) + x[t])
    return h


def detached(x):
    h = zero(x)
    for t in range(T):
        h = 0.5 * h.detach() + x[t]
    return h


def in_place(x):
    h = x[0]
    for t in range(T):
        h.mul_(0.5).add_(x[t])
    return h


def initial_state(x):
    h = zero(x)[:1]
    for t in range(T):
        y = h + x[t]
        h = 2 * x[t]
    return y


def mixes_elements(x):
    h, w = torch.zeros(4 * D), torch.eye(4 * D)  # smaller matrices are multiplied element by element
    for t in range(T):
        h = w @ h + x[t].repeat(4)
    return h


def no_gradient(x):
    h, w = zero(x), torch.ones(D)
    for t in range(T):
        h = 0.5 * h + torch.ops.prims.sin(w) * x[t]
    return h


def no_iteration_form(x):
    h = zero(x)
    for t in range(T):
        h = 0.5 * h + torch.conv1d(x[t, None], x[t, :1, None, None]).squeeze(0)
    return h


def no_scan(x):
    h = zero(x)
    for t in range(T):
        h = 0.5 * h + x[t]
    return h


def number_arithmetic(x):
    h = zero(x)
    for t in range(T):
        h = 0.5 * h + x[t].clamp(max=t)
    return h


def python_constant(x):
    h = zero(x)
    for t in range(T):
        h = 0.5 * h + x[t] + torch.tensor([0.5] * 5000).sum()
    return h


def randomness(x):
    h = zero(x)
    for t in range(T):
        h = 0.5 * h + torch.rand_like(x[t])
    return h


def read_computed(x):
    h, w = zero(x), torch.zeros(T, D)
    for t in range(T):
        w = 0.5 * w
        h = 0.5 * h + w[t]
    return h


def read_uneven(x):
    h = zero(x)
    for t in range(T):
        h = 0.5 * h + x[t * t % T]
    return h


def shared_memory(x):
    out = torch.zeros_like(x)
    h = zero(x)
    for t in range(T):
        h = 0.5 * h + x[t] + out[0]
        out[t] = h
    return out


def states_read(x):
    S, k, out = torch.zeros(3 * D, D), x.repeat(1, 3)[..., None], []
    for t in range(T):
        S = S + k[t] * (x[t] - (S * k[t]).sum(0))
        out.append(S.relu())
    return torch.stack(out)


def write_uneven(x):
    out, h = torch.zeros(2 * T, D), zero(x)
    for t in range(T):
        h = 0.5 * h + x[t]
        out[2 * t] = h
    return out


# Loops that Dynamo traces step by step --------------------------------------------------------------


def step_long(x):
    h, out, t = zero(x), [], 0
    while t < 5:
        u = x[t]
        for _ in range(15):
            u = torch.sin(u)
        for _ in range(7):
            u = torch.sin(u)
        h, t = 0.5 * h + u, t + 1
        out.append(h)
    return torch.stack(out)


def steps_differ(x):
    h, out = zero(x), []
    for t in range(12):
        h = 0.5 * h + (torch.exp(x[t]) if t == 7 else torch.tanh(x[t]))
        out.append(h)
    return torch.stack(out)


NAMES = {
    "carries-coupled": "the carry `a`",
    "carry-dtype": "`n`",
    "carry-not-affine": "`torch.sigmoid(level)` is not affine in the carry `level`",
    "carry-not-tensor": "`scale`",
    "carry-shape": "`tail`",
    "carry-squared": "the carry `level` is multiplied by itself",
    "complex-as-real": "`torch.view_as_complex(h)` of the carry `h`",
    "decay-sign": "the carry `S`",
    "deque": "the deque `past`",
    "detached": "the carry `h` is detached: `h.detach()`",
    "dictionary-keys": "`seen`",
    "dynamo": "queue.add(t)",
    "early-exit": "`break`" if sys.version_info < (3, 12) else "return h",  # where Python says that the jump is
    "first-step": "`h` is float32 of shape (18,) without a gradient before the loop, and float32 of shape (24,)",
    "generator": "`yield h`",
    "global-state": "`COUNT`",
    "higher-order": "torch.utils.checkpoint.checkpoint(",
    "hook": "a hook is registered on a result, `h`",
    "identity": "`h is first`",
    "in-place": "`h`",
    "initial-state": "the carry `h` has the shape (1,) before the loop, and (6,) after a step",
    "list-kind": "`seen`",
    "list-read": "`hs`",
    "loop-inside": "for k in range(16)",
    "mixes-elements": "`w @ h` pairs elements of the carry `h` with one another, as (24, 24)",
    "mode": "for t in range(T)",
    "no-gradient": "prims.sin.default has no gradient",
    "no-iteration-form": "`torch.conv1d(x[t, None], x[t, :1, None, None])`",
    "no-scan": "`h`",
    "number-arithmetic": "`x[t].clamp(max=t)`",
    "outside-change": "`u`",
    "python-constant": "`torch.tensor([0.5] * 5000)`",
    "python-state": "`w` does not grow by the same number, or factor, at every step",
    "randomness": "`torch.rand_like(x[t])`",
    "read-computed": "`w`",
    "read-uneven": "`x` is read at positions that are not evenly spaced",
    "sequence-uneven": "[k * k % T for k in range(T)]",
    "sequence-unknown": "(x[t] for t in range(T))",
    "shared-memory": "a step reads `out`, which steps write to",
    "size-unknown": "`out`",
    "state-unstable": "`h`",
    "states-read": "`S.relu()`",
    "step-number": "step 1, counted from 0, is the first for which `step % 2 == 0` is not true",
    "write-uneven": "`out`",
}
TRAINED = {"decay-sign", "detached", "hook", "no-gradient"}


def told(fn, *calls, mode="inference", dynamic=None):
    """Return the notes of a report on a function's loops, called with some inputs each; results are eager's."""
    entry = Described(mode)

    @captures_loops
    def look(gm, inputs):
        entry.describe(gm, *notes())
        return gm.forward

    compiled = torch.compile(fn, backend=look, dynamic=dynamic)
    for inputs in calls:
        x, *numbers = inputs
        expected = fn(x.detach().clone().requires_grad_(x.requires_grad), *numbers)
        results = compiled(*inputs)
        if fn is not randomness:
            torch.testing.assert_close(results, expected)
    return entry.notes


def check(id, said, fn):
    """Check that a refusal has its id, its remedy, and a line of the function."""
    assert f"[{id}]: {REASONS[id][1]}" in said
    lines, first = inspect.getsourcelines(fn)
    found = [int(at) for at in re.findall(rf"{re.escape(__file__)}:(\d+): \S", said)]
    assert any(first < at < first + len(lines) for at in found), said


@pytest.mark.parametrize("id", NAMES)
def test_a_loop_that_stays(id, monkeypatch):
    if id == "size-unknown" and not KEEPS_SYMBOLS:
        pytest.skip("all sizes are numbers before torch 2.13")
    if id == "hook" and torch.__version__ < (2, 13):
        pytest.skip("a graph holds no hooks on what it computes before torch 2.13")
    torch._dynamo.reset()
    fn, x = globals()[id.replace("-", "_")], torch.randn(T, D)
    if id == "no-scan":  # no program was found: a guard against scans that get lost
        monkeypatch.setattr(to_scan, "SCANS", ())
        monkeypatch.setattr(to_scan, "LINEAR_SYSTEM", None)
    # A number that changes between calls is an input of the second compile.
    calls = [(x, 0.25), (x, 0.5)] if id == "carry-not-tensor" else [(x.requires_grad_(id in TRAINED),)]
    said = told(fn, *calls, mode="training" if id in TRAINED else "inference", dynamic=id == "size-unknown" or None)
    said = [note for note in said if f"[{id}]" in note]
    assert said
    check(id, said[0], fn)
    assert NAMES[id] in said[0]


UNROLLED = {
    "step-long": "`torch.sin(u)`",
    "steps-differ": "step 7, counted from 0, computes `torch.exp(x[t])`, and the step before it computes "
    "`torch.tanh(x[t])`",
}


@pytest.mark.parametrize("id", UNROLLED)
def test_an_unrolled_loop_that_stays(id, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(reroll, "DEPTH", 20)
    fn = globals()[id.replace("-", "_")]
    (graph,) = refold.explain(fn, torch.randn(T, D)).graphs
    said = next(note for note in graph.notes if f"[{id}]" in note)
    check(id, said, fn)
    assert UNROLLED[id] in said


def test_explain_says_why_a_loop_is_not_captured():
    torch._dynamo.reset()
    (graph,) = refold.explain(python_state, torch.randn(T, D)).graphs
    check("python-state", graph.notes[0], python_state)


def test_a_loop_of_pythons_library_is_named_by_the_line_that_calls_it():
    """Dynamo spells such functions in files of its own."""

    def fn(x):
        step = torch.nn.functional.silu
        return torch.stack(list(itertools.accumulate(x, lambda h, now: step(h) + now)))

    torch._dynamo.reset()
    said = told(fn, (torch.randn(T, D),))
    assert not any("polyfills" in note for note in said)
    if torch.__version__ >= (2, 13):
        check("generator", said[0], fn)
        assert "in `accumulate`" in said[0]


# Rewrites and graphs ---------------------------------------------------------------------------------


def scores(x, y):
    return (x[:, :, None] * y[:, None]).sum(-1)


@pytest.fixture
def rewrite(rewritten):
    """A rewrite of a function's line, as the pipeline makes it."""
    (found,) = rewritten(scores, torch.randn(2, 9, 16), torch.randn(2, 8, 16)).rewrites
    return found


def wrong(rewrite):
    node = next(node for node in rewrite.candidate.graph.nodes if node.target is torch.ops.aten.bmm.default)
    with rewrite.candidate.graph.inserting_after(node):
        new = rewrite.candidate.graph.call_function(torch.ops.aten.neg.default, (node,))
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    rewrite.candidate.recompile()


def undescribed(rewrite):
    for node in rewrite.candidate.graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default):
        node.meta["val"] = node.meta["val"].double()


def unknown(rewrite):
    for node in rewrite.original.graph.find_nodes(op="placeholder"):
        node.meta["val"] = node.meta["val"].long()


def slow(rewrite, monkeypatch):
    race = Timing(1.0, 2.0, 0.5, 0.5, 0.5, 9, False)
    monkeypatch.setattr(region, "_time", lambda *args: (race, "eager"))
    monkeypatch.setattr(region, "clearly_less", lambda *args: False)


@pytest.mark.parametrize("id", ["not-equal", "metadata-wrong", "inputs-unknown", "not-faster"])
def test_a_rewrite_that_is_not_used(id, rewrite, monkeypatch):
    if id == "not-faster":
        slow(rewrite, monkeypatch)
    else:
        {"not-equal": wrong, "metadata-wrong": undescribed, "inputs-unknown": unknown}[id](rewrite)
    verdict = region.validate_region(rewrite, None, Options(verify="off" if id == "not-faster" else "quick"))
    check(id, f"{rewrite.source}: {verdict.reason}", scores)
