"""Which races are run, and which are spared: compiling what only loses a race is what a first call spends most on."""

import time
from dataclasses import replace

import pytest
import torch

import refold
from refold.compiler.validate import program, region
from refold.verify.timing import LOOKS, Timing
from support.trial import no_code

WON = Timing(base_ms=4.0, candidate_ms=1.0, speedup=4.0, at_least=3.9, at_most=4.1, pairs=9, faster=True)
LOST = replace(WON, speedup=0.5, at_least=0.4, at_most=0.6, faster=False)


def scores(x, y):
    return (x[:, :, None] * y[:, None]).sum(-1)


def twice(x, y, z):
    return scores(x, y), scores(x, z)


def ema(x):
    h, ys = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = 0.9 * h + x[:, t]
        ys.append(h)
    return torch.stack(ys, 1)


def tensors():
    return [torch.randn(2, n, 16) for n in (9, 8, 7)]


@pytest.fixture
def races(monkeypatch):
    """Return the outcomes of coming races of the whole graph, and a list of the regions that were timed alone."""
    torch._dynamo.reset()
    outcomes, alone = [WON], []

    def timed(rewrite, *_):
        alone.append(rewrite.detail)
        return (LOST if len(alone) == 1 else WON), "torch.compile"

    monkeypatch.setattr(region, "FEW_OPERATIONS", 0)
    monkeypatch.setattr(region, "_time", timed)
    monkeypatch.setattr(program, "race", lambda *args, **kwargs: outcomes.pop(0))
    return outcomes, alone


def compiled(fn, *inputs):
    layer = refold.compile(fn, cache=False, strict=True)
    with no_code(), torch.no_grad():
        layer(*inputs)
    return layer.report.graphs[0]


def test_a_large_region_is_timed_with_the_whole_graph(races):
    graph = compiled(twice, *tensors())
    assert graph.chosen == "refold"
    assert [row.status for row in graph.rewrites] == ["applied", "applied"]
    assert all(row.errors for row in graph.rewrites)
    assert races == ([], [])


def test_each_is_timed_alone_if_they_lose_together(races):
    outcomes, alone = races
    outcomes[:] = [LOST, WON]
    graph = compiled(twice, *tensors())
    assert len(alone) == 2
    assert graph.chosen == "refold"
    assert sorted(row.status for row in graph.rewrites) == ["applied", "refused"]
    assert next(row for row in graph.rewrites if row.status == "refused").reason.startswith("not faster: 0.50x")
    assert not outcomes


def test_one_that_loses_is_not_timed_again(races):
    races[0][:] = [LOST]
    graph = compiled(scores, *tensors()[:2])
    assert graph.chosen != "refold"
    assert races == ([], [])
    assert graph.rewrites[0].status == "refused"


@pytest.mark.exhaustive
def test_in_training_a_forward_is_not_timed_without_its_backward(races, monkeypatch):
    monkeypatch.setattr(region, "FEW_OPERATIONS", 1000)
    layer = refold.compile(ema, cache=False, strict=True)
    with no_code():
        layer(torch.randn(2, 20, 3, requires_grad=True))
    (graph,) = layer.report.graphs
    assert (graph.chosen, [row.status for row in graph.rewrites]) == ("refold", ["applied"])
    assert races == ([], [])


def test_in_training_what_is_timed_alone_is_timed_with_its_backward(monkeypatch):
    torch._dynamo.reset()
    backwards, outcomes, time = [], [LOST, WON], region._time

    def timed(rewrite, baseline, inputs, *others):
        grad = torch.autograd.grad
        with monkeypatch.context() as patched:
            patched.setattr(torch.autograd, "grad", lambda *a, **k: (backwards.append(1), grad(*a, **k))[1])
            patched.setattr(region, "compile_or_none", lambda *args: None)
            patched.setattr(region, "race", lambda base, ours, *_, **__: (base(), ours(), WON)[-1])
            return time(rewrite, baseline, inputs, *others)

    monkeypatch.setattr(region, "_time", timed)
    monkeypatch.setattr(program, "race", lambda *args, **kwargs: outcomes.pop(0))
    layer = refold.compile(ema, cache=False, strict=True)
    with no_code():
        layer(torch.randn(2, 20, 3, requires_grad=True))
    (graph,) = layer.report.graphs
    assert (graph.chosen, [row.status for row in graph.rewrites], outcomes) == ("refold", ["applied"], [])
    assert len(backwards) >= 3


@pytest.mark.parametrize("clearly", [True, False])
def test_a_rival_that_is_long_to_compile_is_spared_by_a_clear_win(races, clearly, monkeypatch):
    compiles, outcomes = [], races[0]
    outcomes[:] = [WON] if clearly else [replace(WON, speedup=1.9), WON]
    monkeypatch.setattr(program, "ORIGINAL_S", 0.0)
    monkeypatch.setattr(program, "clearly_less", lambda *costs: True)
    compile_it = program.Rival.compiled
    monkeypatch.setattr(program.Rival, "compiled", lambda rival: (compiles.append(1), compile_it(rival))[1])
    graph = compiled(scores, *tensors()[:2])
    assert graph.chosen == "refold"
    assert graph.checks
    assert not outcomes
    assert bool(compiles) is not clearly
    assert ("torch.compile" in graph.times_ms) is not clearly
    assert any("compiling the original would take about 0 s" in note for note in graph.notes) is clearly


def test_nothing_is_spared_where_eager_does_not_fit(races, monkeypatch):
    monkeypatch.setattr(program, "ORIGINAL_S", 0.0)
    monkeypatch.setattr(program, "clearly_less", lambda *costs: True)
    monkeypatch.setattr(program, "available_bytes", lambda device: 0)
    graph = compiled(scores, *tensors()[:2])
    assert (graph.chosen, list(graph.times_ms), races[0]) == ("refold", ["torch.compile", "refold"], [])


def test_nothing_is_raced_against_an_original_that_cannot_be_run(races, monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("no code for it")

    monkeypatch.setattr(program, "ORIGINAL_S", 0.0)
    monkeypatch.setattr(program, "clearly_less", lambda *costs: True)
    monkeypatch.setattr(program, "available_bytes", lambda device: 0)
    monkeypatch.setattr(program, "standalone", fails)
    graph = compiled(scores, *tensors()[:2])
    assert (graph.chosen, list(graph.times_ms), len(races[0])) == ("refold", ["refold"], 1)


def test_what_the_first_attempt_found_out_holds_in_the_second(races, monkeypatch):
    outcomes, alone = races
    outcomes[:] = [LOST, WON]
    checks, compiles, check, standalone = [], [], region.check, program.standalone
    monkeypatch.setattr(region, "check", lambda *args, **kwargs: (checks.append(1), check(*args, **kwargs))[1])
    monkeypatch.setattr(program, "standalone", lambda *a, **k: (compiles.append(1), standalone(*a, **k))[1])
    graph = compiled(twice, *tensors())
    assert (graph.chosen, outcomes) == ("refold", [])
    assert (len(checks), len(alone), len(compiles)) == (2, 2, 1)
    assert all(row.errors for row in graph.rewrites)
    assert graph.inductor_compile_s is not None


def test_the_parts_of_a_first_call_share_nothing(races, monkeypatch):
    outcomes, _ = races
    outcomes[:] = [LOST, WON]
    standalone = program.standalone
    monkeypatch.setattr(program, "standalone", lambda *a, **k: (time.sleep(1), standalone(*a, **k))[1])
    start = time.perf_counter()
    graph = compiled(twice, *tensors())
    whole = time.perf_counter() - start
    assert graph.inductor_compile_s > 1
    assert min(graph.compile_s, graph.checks_s) > 0
    assert graph.compile_s + graph.checks_s + graph.inductor_compile_s < whole


def test_a_tie_of_a_small_region_is_soon_called(races, monkeypatch):
    looks = []
    monkeypatch.setattr(region, "FEW_OPERATIONS", 8)
    monkeypatch.setattr(region, "_time", lambda *args: (looks.append(args[-1]), (WON, "eager"))[1])
    compiled(scores, *tensors()[:2])
    assert looks == [LOOKS[:1]]
    looks.clear()
    monkeypatch.setattr(region, "FEW_OPERATIONS", 0)
    races[0][:] = [LOST, WON]
    torch._dynamo.reset()
    compiled(twice, *tensors())
    assert looks == [LOOKS, LOOKS]
