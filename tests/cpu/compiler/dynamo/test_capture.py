"""Loops over time are captured: one traced body for any length; loops that cannot be captured stay."""

import math

import pytest
import torch

import refold
from refold.compiler import session
from refold.compiler.dynamo import captures_loops
from refold.compiler.dynamo.induction_variable import _first_failure
from refold.compiler.refusals import REASONS
from refold.compiler.session import describe_captured
from refold.report import GraphReport

pytestmark = pytest.mark.rows(16)

B, T, D, N = 2, 40, 5, 3


def xs():
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(0))


def scan(x, h=None):
    ys = []
    for t in range(x.shape[1]):
        h = x[:, t] if h is None else 0.5 * h + x[:, t]
        ys.append(h)
    return torch.stack(ys, 1)


def two_values_a_step(x):
    h, ys = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = 0.5 * h + x[:, t]
        ys.append(h)
        ys.append(h * 2)
    return torch.stack(ys, 1), len(ys)


def single_items(x):
    h, ys = torch.zeros_like(x[:, 0]), []
    for xt in x.unbind(1):
        h = 0.5 * h + xt
        ys.append(h)
    return ys[-1], ys[5] + ys[-3], torch.stack(ys[::-1], 1), torch.stack(ys[3:9], 1), torch.cat([x[:, 0], *ys], 1)


def zipped(x):
    h, ys = torch.zeros_like(x[:, 0]), []
    for t, (a, b) in zip(range(7, 100), zip(x.unbind(1), x.sigmoid().unbind(1), strict=True)):  # noqa: B007, B905
        h = b * h + a
        ys.append(h)
    return torch.stack(ys, 1), t


def counter(x):
    h, i = torch.zeros_like(x[:, 0]), 0
    for _ in range(x.shape[1]):
        h = 0.5 * h + x[:, i]
        i += 1
    return h, i


def tuple_state(x):
    state = (torch.zeros_like(x[:, 0]), torch.ones_like(x[:, 0]))
    for xt in x.unbind(1):
        h, g = state
        state = (0.5 * h + xt, 0.5 * g + h)
    return state


def in_place(x):
    h, ys = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h += x[:, t]
        h.mul_(0.5)
        ys.append(h)
    return torch.stack(ys, 1), h


def writes(x):
    out = torch.zeros_like(x)
    h = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        h = 0.5 * h + x[:, -1 - t]
        out[:, -1 - t] = h
    return out


def writes_over_its_input(x):
    x = x * 1.0
    for t in range(1, x.shape[1]):
        x[:, t] = 0.5 * x[:, t - 1] + x[:, t]
    return x


def two_loops(x):
    return scan(scan(x).tanh())


def last_step_differs(x):
    h = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        h = 0.5 * h + x[:, t]
        if t < x.shape[1] - 1:
            h = h.tanh()
    return h


def halves(x):
    h = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        h = 0.5 * h + x[:, t] if t < 20 else h - x[:, t]
    return h


def short_inner_loop(x):
    h = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        for k in range(3):
            h = h * 0.5 + x[:, t] * k
    return h


def python_numbers(x):
    h = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        h = math.cos(t) * h + x[:, t]
    return h


CAPTURED = [
    (scan, [T - 1]), (two_values_a_step, [T]), (single_items, [T]), (zipped, [T]), (counter, [T]),
    (tuple_state, [T]), (in_place, [T]), (writes, [T]), (writes_over_its_input, [T - 1]), (two_loops, [T - 1] * 2),
    (last_step_differs, [T - 1]), (halves, [20, 19]), (python_numbers, [T]), (short_inner_loop, [T]),
]  # fmt: skip


def test_a_stack_of_all_steps_takes_no_part_of_them():
    """The gradient of a part of all would be one more copy."""
    targets = []

    @captures_loops
    def backend(gm, _):
        spliced, _ = describe_captured(gm, GraphReport(index=0, mode="training"))
        targets.extend(node.target for node in spliced.graph.nodes)
        return gm

    torch._dynamo.reset()
    torch.compile(scan, backend=backend, fullgraph=True)(xs(), torch.zeros(B, D))
    assert torch.movedim in targets
    assert torch.ops.aten.slice.Tensor not in targets


@pytest.mark.parametrize(("fn", "steps"), CAPTURED, ids=[case[0].__name__ for case in CAPTURED])
def test_captured(captured, fn, steps):
    got, found = captured(fn, xs())
    torch.testing.assert_close(got, fn(xs()))
    assert found == steps


def every_other(x):
    h = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        h = 0.5 * h + x[:, t] if t % 2 else h - x[:, t]
    return h


def now_and_then(x):
    h = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        if t % 16 == 0 and t:
            h = h.tanh()
        h = 0.5 * h + x[:, t]
    return h


def looked_up(x):
    h, weights = torch.zeros_like(x[:, 0]), [0.1 * (k % 7) for k in range(T)]
    for t in range(x.shape[1]):
        h = weights[t] * h + x[:, t]
    return h


def left_early(x):
    h = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        h = 0.5 * h + x[:, t]
        if t == 30:
            break
    return h


def reads_its_list(x):
    ys = [torch.zeros_like(x[:, 0])]
    for t in range(x.shape[1]):
        ys.append(0.5 * ys[-1] + x[:, t] * len(ys))
    return torch.stack(ys, 1)


def two_names_for_a_list(x):
    ys = []
    zs = ys
    h = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        h = 0.5 * h + x[:, t]
        ys.append(h)
        if len(zs) > 20:
            h = -h
    return torch.stack(ys, 1)


def popped(x):
    rest, h = list(x.unbind(1)), torch.zeros_like(x[:, 0])
    for _ in range(x.shape[1]):
        h = 0.5 * h + rest.pop()
    return h


def generator(x):
    h = torch.zeros_like(x[:, 0])
    for xt in (x[:, t] * t for t in range(T)):
        h = 0.5 * h + xt
    return h


def other_shapes(x):
    h = x[:, :1]
    for t in range(1, x.shape[1]):
        h = torch.cat([h, x[:, t : t + 1]], 1)
    return h


def grad_modes(x):
    h = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        with torch.no_grad():
            g = h * 0.5
        h = g + x[:, t]
    return h


AS_THEY_ARE = [
    every_other, now_and_then, looked_up, reads_its_list, two_names_for_a_list, popped, generator, other_shapes,
    grad_modes,
]  # fmt: skip


@pytest.mark.parametrize("fn", AS_THEY_ARE, ids=lambda fn: fn.__name__)
def test_traced_as_they_are(captured, fn):
    got, found = captured(fn, xs())
    torch.testing.assert_close(got, fn(xs()))
    assert found == []


def test_a_loop_that_is_left_early(captured):
    got, found = captured(left_early, xs())
    torch.testing.assert_close(got, left_early(xs()))
    assert found in ([], [30])


def test_layers_with_different_weights_are_no_loop_over_time(captured):
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(torch.nn.Linear(D, D) for _ in range(20))

    def fn(x):
        for layer in layers:
            x = torch.tanh(layer(x))
        return x

    got, found = captured(fn, xs())
    torch.testing.assert_close(got, fn(xs()))
    assert found == []


def test_dropout_draws_anew_at_every_step(captured):
    def fn(x):
        ys = []
        for _ in range(T):
            ys.append(torch.nn.functional.dropout(x[:, 0], 0.5))
        return torch.stack(ys)

    got, _ = captured(fn, xs())
    assert not all(torch.equal(got[0], y) for y in got)


def test_other_backends_are_left_alone():
    nodes = []

    def backend(gm, _):
        nodes.append(len(gm.graph.nodes))
        return gm

    torch._dynamo.reset()
    torch.compile(scan, backend=backend)(xs())
    assert nodes[0] > 2 * T


def test_gradients_flow_through_a_captured_loop(captured):
    x = xs().requires_grad_()
    a = torch.rand(D).requires_grad_()

    def fn(x, a):
        h, ys = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = a * h + x[:, t]
            ys.append(h)
        return torch.stack(ys, 1)

    got, found = captured(fn, x, a)
    assert found == [T]
    grads = [torch.autograd.grad(y.square().sum(), (x, a)) for y in (got, fn(x, a))]
    torch.testing.assert_close(*grads)


def mamba1(x, dt, A, B_, C):
    h, ys = torch.zeros(x.shape[0], x.shape[2], A.shape[1]), []
    for t in range(x.shape[1]):
        h = torch.exp(dt[:, t, :, None] * A) * h + dt[:, t, :, None] * B_[:, t, None, :] * x[:, t, :, None]
        ys.append((h * C[:, t, None, :]).sum(-1))
    return torch.stack(ys, dim=1) + x, h


def inputs_mamba1(steps):
    return [
        torch.randn(B, steps, D), torch.rand(B, steps, D), -torch.rand(D, N), torch.randn(B, steps, N),
        torch.randn(B, steps, N),
    ]  # fmt: skip


@pytest.mark.parametrize("train", [False, True])
def test_a_captured_loop_becomes_a_scan(train):
    torch._dynamo.reset()
    inputs = [x.requires_grad_(train) for x in inputs_mamba1(T)]
    compiled = refold.compile(mamba1, accept="always", strict=True)
    got, expected = compiled(*inputs), mamba1(*inputs)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    row = next(row for row in compiled.report.rewrites if row.name == "roll up loop")
    assert row.status == "applied"
    assert "h = torch.exp" in row.source
    assert "selective_scan" in row.detail
    assert row.flops_before > row.flops_after
    if train:
        grads = [torch.autograd.grad(sum(y.square().sum() for y in ys), inputs) for ys in (got, expected)]
        torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-3)


def changed_behind(x):
    h, ys = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = 0.5 * h + x[:, t]
        ys.append(h)
    h.add_(1)
    return torch.stack(ys, 1)


def items_are_the_state(x):
    h, ys = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = 0.5 * h + x[:, t]
        ys.append(h)
    return h, ys


def under_autocast(x):
    w, h, ys = x[0, :D], torch.zeros_like(x[:, 0], dtype=torch.bfloat16), []
    with torch.autocast("cpu", torch.bfloat16):
        for t in range(x.shape[1]):
            h = 0.5 * h + x[:, t] @ w
            ys.append(h)
    return torch.stack(ys, 1)


@pytest.mark.parametrize("fn", [changed_behind, items_are_the_state, under_autocast, writes, in_place])
def test_memory_and_modes_are_the_users(fn):
    torch._dynamo.reset()
    compiled = refold.compile(fn, accept="always", strict=True)
    x = xs()[:, :18]  # what is no scan is compiled step by step
    got, expected = compiled(x), fn(x)
    # A sum of D products in bfloat16, carried on with a factor of a half.
    tolerance = 2 * D * 2.0**-8 * 4 if fn is under_autocast else 1e-4
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    rolled = [row.site for row in compiled.report.rewrites if "loop_over_time" in row.site]
    assert bool(rolled) == (fn is writes)


def test_what_was_unpacked_to_go_through_it_is_not_traced(monkeypatch):
    # An `unbind` of thousands of items that nobody reads costs seconds in each tracing.
    def through_items(x):
        items = x.unbind(1)
        h, ys = torch.zeros_like(items[0]), []
        for item, gate in zip(items, torch.sigmoid(x).unbind(1), strict=True):
            h = gate * h + item
            ys.append(h)
        return torch.stack(ys, 1) + items[-1][:, None]

    traced = []
    compile_with = session.inductor_with

    def recording(gm, *args, **kwargs):
        traced.append([node.target for node in gm.graph.nodes])
        return compile_with(gm, *args, **kwargs)

    monkeypatch.setattr(session, "inductor_with", recording)
    torch._dynamo.reset()
    refold.compile(through_items, accept="always", strict=True)(xs())
    assert traced
    assert all("unbind" not in targets for targets in traced)


def gru(x, w, u):
    h, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        z = torch.sigmoid(x[:, t] @ w + h @ u)
        h = (1 - z) * h + z * torch.tanh(x[:, t])
        out.append(h)
    return torch.stack(out, 1)


def test_a_loop_that_is_no_scan_stays_and_the_report_says_why():
    torch._dynamo.reset()
    inputs = xs()[:, :18], torch.randn(D, D), torch.randn(D, D)
    compiled = refold.compile(gru, accept="always", strict=True, verify="off")
    torch.testing.assert_close(compiled(*inputs), gru(*inputs))
    (note,) = [
        note for graph in compiled.report.graphs for note in graph.notes if "a loop over time is not rewritten" in note
    ]
    assert "mixes elements" in note
    assert "18 steps" in note


def squares(x):
    level, ys = x[:, 0], []
    for t in range(x.shape[1]):
        level = level * level + x[:, t]
        ys.append(level)
    return torch.stack(ys, 1)


def test_a_refusal_names_the_variable_the_line_the_reason_and_the_remedy():
    torch._dynamo.reset()
    (graph,) = refold.explain(squares, xs()).graphs
    (note,) = [note for note in graph.notes if "a loop over time is not rewritten" in note]
    assert "the carry `level` is multiplied by itself" in note
    assert f"test_capture.py:{squares.__code__.co_firstlineno + 3}: level = level * level" in note
    assert f"[carry-squared]: {REASONS['carry-squared'][1]}" in note


def test_the_work_of_compiling_does_not_grow_with_the_steps(monkeypatch):
    traced = []
    original = torch._subclasses.fake_tensor.FakeTensorMode.__torch_dispatch__

    def counted(*args, **kwargs):
        traced[-1] += 1
        return original(*args, **kwargs)

    monkeypatch.setattr(torch._subclasses.fake_tensor.FakeTensorMode, "__torch_dispatch__", counted)
    for steps in (64, 512):
        torch._dynamo.reset()
        traced.append(0)
        (graph,) = refold.explain(mamba1, *inputs_mamba1(steps)).graphs
        assert any(f"{steps} steps one after another" in loop for loop in graph.loops)
        assert any("selective_scan" in row.detail for row in graph.rewrites)
    # What is left is a fake value for each item of a list.
    assert traced[1] - traced[0] < 4 * (512 - 64)


@pytest.mark.parametrize("op", ["==", "!=", "<", "<=", ">", ">="])
def test_the_first_step_that_decides_otherwise(op):
    holds = {
        "==": lambda v: v == 0, "!=": lambda v: v != 0, "<": lambda v: v < 0,
        "<=": lambda v: v <= 0, ">": lambda v: v > 0, ">=": lambda v: v >= 0,
    }[op]  # fmt: skip
    for a in range(-3, 4):
        for b in range(-9, 10):
            expected = next((k for k in range(9) if not holds(a * k + b)), 9)
            assert _first_failure(op, a, b, 9) == expected


@pytest.mark.parametrize("join", [torch.stack, torch.cat])
def test_graphs_with_scans_can_be_cached(join):
    """A second process would trace them anew: AOTAutograd's cache takes methods of values with an example alone."""
    graphs = []

    @captures_loops
    def backend(gm, _):
        gm, _ = describe_captured(gm, GraphReport(index=0))
        graphs.append(gm.graph)
        return gm

    def ema(x):
        h, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = 0.9 * h + x[:, t]
            out.append(h)
        return join(out, 1)

    torch._dynamo.reset()
    torch.compile(ema, backend=backend)(torch.randn(2, 20, 3))
    (graph,) = graphs
    assert graph.find_nodes(op="call_function", target=torch.ops.refold.linear_scan.default)
    assert all("example_value" in node.args[0].meta for node in graph.find_nodes(op="call_method"))
