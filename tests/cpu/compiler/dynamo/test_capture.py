"""Loops over time are captured: one traced body for any length; loops that cannot be captured stay."""

import pytest
import torch

import refold
from refold.bench.recurrences import HEAD, RECURRENCES
from refold.compiler import session
from refold.compiler.dynamo import captures_loops
from refold.compiler.dynamo.induction_variable import _first_failure
from refold.compiler.session import describe_captured
from refold.report import GraphReport

pytestmark = pytest.mark.rows(16)

B, T, D = 2, 40, 5


def xs():
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(0))


def scan(x, h=None):
    ys = []
    for t in range(x.shape[1]):
        h = x[:, t] if h is None else 0.5 * h + x[:, t]
        ys.append(h)
    return torch.stack(ys, 1)


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
        one = RECURRENCES["selective"]
        (graph,) = refold.explain(one.fn, *one.inputs(B, steps, HEAD)).graphs
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
