"""Loops that cannot be rewritten do not cost minutes: over the budget, the graph runs eagerly, with a note."""

import pytest
import torch

import refold
from refold.compiler import pipeline, record
from refold.compiler.compile_time import inductor_seconds
from refold.compiler.decisions.store import forget
from refold.compiler.refusals import REASONS
from refold.errors import ArgumentError


def gru(x):
    h, ys = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = torch.tanh(h + x[:, t])
        ys.append(h)
    return torch.stack(ys, 1)


def with_a_scan(x):
    h, ys = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = 0.5 * h + x[:, t]
        ys.append(h)
    return gru(x) + torch.stack(ys, 1)


def test_a_captured_loop_over_the_budget_runs_eagerly(monkeypatch):
    monkeypatch.setattr("refold.compiler.inductor.compile_fx", None)  # which would take minutes
    x = torch.randn(2, 1500, 4)
    compiled = refold.compile(gru, strict=True, cache=False)
    torch.testing.assert_close(compiled(x), gru(x), rtol=0, atol=0)
    (graph,) = compiled.report.graphs
    assert graph.chosen == "eager"
    assert "compile_budget is 60 s" in graph.reason


@pytest.mark.exhaustive
def test_an_unrolled_loop_over_the_budget_runs_eagerly():
    x = torch.randn(2, 40, 4)
    compiled = refold.compile(gru, strict=True, cache=False, loops="unroll", compile_budget=0.01)
    torch.testing.assert_close(compiled(x), gru(x), rtol=0, atol=0)
    assert compiled.report.graphs[0].chosen == "eager"
    assert f"compile_budget is 0.01 s [too-long]: {REASONS['too-long'][1]}" in str(compiled.report)


@pytest.mark.exhaustive
def test_scans_of_such_a_graph_still_run():
    x = torch.randn(2, 40, 4, requires_grad=True)
    compiled = refold.compile(with_a_scan, strict=True, cache=False, accept="always", compile_budget=0.01)
    got, expected = compiled(x), with_a_scan(x)
    torch.testing.assert_close(got, expected)
    own, eager = (torch.autograd.grad(y.sin().sum(), x)[0] for y in (got, expected))
    torch.testing.assert_close(own, eager)
    (graph,) = compiled.report.graphs
    assert (graph.chosen, [row.status for row in graph.rewrites]) == ("refold", ["applied"])
    assert graph.checks
    assert any("runs eagerly" in note for note in graph.notes)


@pytest.mark.rows(4)
@pytest.mark.parametrize("by", ["disk", "plan"])
@pytest.mark.parametrize("loop", [gru, with_a_scan])
def test_such_a_graph_is_remembered_and_replayed(loop, by, tmp_path):
    options = {"strict": True, "accept": "always", "compile_budget": 0.01}
    x = torch.randn(2, 40, 4)
    first = refold.compile(loop, cache=tmp_path, **options)
    expected = first(x)
    torch._dynamo.reset()
    forget()
    more = {"cache": tmp_path} if by == "disk" else {"cache": False, "plan": first.report}
    second = refold.compile(loop, **more, **options)
    assert torch.equal(second(x), expected)
    (before,), (graph,) = first.report.graphs, second.report.graphs
    assert graph.remembered == ("the disk" if by == "disk" else "a plan")
    assert (graph.chosen, len(graph.applied)) == (before.chosen, len(before.applied))
    assert graph.chosen == ("refold" if loop is with_a_scan else "eager")
    assert any("runs eagerly" in note for note in graph.notes)


def test_rewrites_of_a_graph_over_the_budget_are_not_judged(monkeypatch):
    """To time them would take Inductor as long as it may take at all."""
    monkeypatch.setattr(record, "validate_region", None)
    compiled = refold.compile(with_a_scan, strict=True, cache=False, loops="unroll", compile_budget=0.01)
    x = torch.randn(2, 40, 4)
    torch.testing.assert_close(compiled(x), with_a_scan(x), rtol=0, atol=0)
    assert compiled.report.graphs[0].chosen == "eager"


def test_a_loop_that_dynamo_has_unrolled_is_not_compiled_to_be_timed(monkeypatch):
    monkeypatch.setattr("refold.compiler.compile_time.inductor_seconds", lambda operations: operations)
    x = torch.randn(2, 40, 4)
    compiled = refold.compile(with_a_scan, strict=True, cache=False, loops="unroll", verify="off")
    torch.testing.assert_close(compiled(x), with_a_scan(x))
    assert "torch.compile was not timed: compiling the unrolled loop would take" in str(compiled.report)


@pytest.mark.exhaustive
def test_layers_are_no_loop():
    layers = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(12)))
    compiled = refold.compile(layers, strict=True, cache=False, compile_budget=0.0001)
    compiled(torch.randn(4, 4))
    assert compiled.report.graphs[0].chosen == "inductor"


def test_the_estimate_grows_faster_than_the_loop():
    assert 1 < inductor_seconds(300) < 15 < 60 < inductor_seconds(2400) < 100
    assert inductor_seconds(2000) > 3 * inductor_seconds(1000)


def test_a_search_that_takes_too_long_ends_and_says_so(monkeypatch):
    monkeypatch.setattr(pipeline, "SEARCH_S", 0.0)
    compiled = refold.compile(with_a_scan, strict=True, cache=False, loops="unroll", accept="always")
    x = torch.randn(2, 8, 4)
    torch.testing.assert_close(compiled(x), with_a_scan(x))
    (graph,) = compiled.report.graphs
    assert graph.rewrites == ()
    assert any("the search for rewrites ended after 0 s" in note for note in graph.notes)


@pytest.mark.parametrize("budget", [0, -1, "60", True, None, float("nan")])
def test_budgets_that_are_no_seconds(budget):
    with pytest.raises(ArgumentError, match="compile_budget must be a number of seconds above 0"):
        refold.compile(gru, compile_budget=budget)


def by_tensor(x, n):
    h, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = torch.tanh(h) * 0.9 + x[:, t] * (-0.9) ** n[t]
        out.append(h)
    return torch.stack(out, 1)


def by_size(x, n):
    return torch.tanh(x) * (-1) ** (x.shape[1] + 1)


@pytest.mark.codegen
@pytest.mark.filterwarnings("ignore::refold.errors.RefoldWarning")  # Inductor of torch 2.13 fails on `by_size`
@pytest.mark.parametrize(("fn", "steps", "dynamic"), [(by_tensor, (24,), None), (by_size, (24, 21), True)])
def test_a_graph_that_runs_eagerly_has_powers_of_negative_numbers(fn, steps, dynamic):
    """PyTorch prints ``(-0.9) ** x`` without brackets in the code of a graph."""
    torch._dynamo.reset()
    compiled = refold.compile(fn, compile_budget=1e-9, dynamic=dynamic)
    for count in steps:
        x, n = torch.randn(2, count, 4), torch.arange(count).float()
        torch.testing.assert_close(compiled(x, n), fn(x, n))
    if fn is by_tensor:
        assert compiled.report.graphs[0].chosen == "eager"


def test_a_rewrite_is_compared_with_powers_of_negative_numbers():
    def fn(x, n):
        y = x * ((-1.0) ** n)[None, :, None]
        return (y[:, :, None, :] * x[:, None, :, :]).sum(-1)

    torch._dynamo.reset()
    compiled = refold.compile(fn, accept="always")
    x, n = torch.randn(2, 48, 4), torch.arange(48).float()
    torch.testing.assert_close(compiled(x, n), fn(x, n))
    assert [row.status for row in compiled.report.graphs[0].rewrites] == ["applied"]
