"""Decisions are remembered in the process and on disk, replayed exactly, and never where they do not hold."""

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch
import torch.nn as nn

import refold
from refold.compiler import record, replay, session
from refold.compiler.decisions import Unnameable, forget, name_program, place, store
from refold.compiler.decisions.store import Store, default_folder
from refold.compiler.refusals import REASONS
from refold.compiler.validate import region
from refold.errors import ArgumentError, RefoldWarning
from refold.verify.timing import Timing


@pytest.fixture
def folder(tmp_path):
    """Return an empty folder, and forget what the process knows, before and after."""
    forget()
    yield tmp_path / "cache"
    forget()


@pytest.fixture
def judged(monkeypatch):
    """Count what is judged, raced and compared."""
    counts = {"validate_region": 0, "choose_program": 0}

    def counting(module, name):
        real = getattr(module, name)

        def run(*args):
            counts[name] += 1
            return real(*args)

        monkeypatch.setattr(module, name, run)

    counting(record, "validate_region")
    counting(session, "choose_program")
    return counts


def scores(x, y):
    return (x[:, :, None] * y[:, None]).sum(-1)


def pair(n=9, dtype=torch.float32):
    return torch.randn(2, n, 16, dtype=dtype), torch.randn(2, 8, 16, dtype=dtype)


def ema(x):
    h, ys = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = 0.9 * h + x[:, t]
        ys.append(h)
    return torch.stack(ys, 1)


def afresh(fn, folder, *inputs, **options):
    """Compile as another process would, except for what is on disk."""
    torch._dynamo.reset()
    forget()
    compiled = refold.compile(fn, cache=folder, **{"accept": "always", "strict": True, **options})
    return compiled(*inputs), compiled.report.graphs[0]


@pytest.mark.parametrize(("fn", "inputs"), [(scores, pair()), (ema, (torch.randn(2, 20, 3),))])
def test_what_was_decided_is_not_decided_again(folder, judged, fn, inputs):
    first, before = afresh(fn, folder, *inputs)
    assert judged == {"validate_region": 1, "choose_program": 1}
    second, after = afresh(fn, folder, *inputs)
    assert judged == {"validate_region": 1, "choose_program": 1}
    torch.testing.assert_close(first, second)  # libraries of products do not promise equal bits on a busy machine
    assert (before.remembered, after.remembered) == ("", "the disk")
    ignored = {"compile_s", "checks_s", "remembered", "notes"}
    one, other = ({k: v for k, v in dataclasses.asdict(g).items() if k not in ignored} for g in (before, after))
    assert one == other


def test_a_recompile_in_the_same_process_asks_no_disk(folder, judged):
    inputs = pair()
    for _ in range(2):
        torch._dynamo.reset()
        compiled = refold.compile(scores, cache=folder, accept="always")
        compiled(*inputs)
        for path in folder.rglob("*.json"):
            path.unlink()
    assert compiled.report.graphs[0].remembered == "this process"
    assert judged["validate_region"] == 1


def test_equal_regions_of_different_graphs_are_judged_once(folder, judged):
    afresh(scores, folder, *pair())
    _, graph = afresh(lambda x, y: scores(x, y) + 1, folder, *pair())
    assert graph.remembered == ""
    assert graph.chosen == "refold"
    assert judged == {"validate_region": 1, "choose_program": 2}


@pytest.mark.rows(4)
@pytest.mark.parametrize(
    "change",
    [
        {"inputs": pair(10)},
        {"inputs": pair(dtype=torch.float64)},
        {"inputs": (pair()[0].transpose(0, 1).contiguous().transpose(0, 1), pair()[1])},
        {"inputs": tuple(x.requires_grad_() for x in pair())},
        {"fn": lambda x, y: (x[:, :, None] * y[:, None]).mean(-1)},
        {"options": {"max_fusion_size": 32}},
        {"verify": "off"},
    ],
    ids=["size", "dtype", "strides", "gradient", "program", "option", "level"],
)
def test_another_program_is_another_decision(folder, change):
    afresh(scores, folder, *pair())
    options = {key: change[key] for key in ("options", "verify") if key in change}
    _, graph = afresh(change.get("fn", scores), folder, *change.get("inputs", pair()), **options)
    assert graph.remembered == ""


def test_another_place_is_another_decision(folder, monkeypatch):
    here = place(pair())
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert place(pair()) != here
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setattr("refold.compiler.decisions.keys.versions", lambda: ["another version"])
    assert place(pair()) != here


@pytest.mark.rows(4)
@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"format": 1}', '{"format": 99}', "\x00\xff"])
def test_files_that_are_not_decisions_are_ignored_with_a_note(folder, judged, content):
    afresh(scores, folder, *pair())
    for path in folder.rglob("*.json"):
        path.write_text(content)
    _, graph = afresh(scores, folder, *pair())
    assert graph.chosen == "refold"
    assert graph.remembered == ""
    assert any("is ignored" in note for note in graph.notes)
    assert judged["validate_region"] == 2
    assert afresh(scores, folder, *pair())[1].remembered == "the disk"  # they were written anew


@pytest.mark.parametrize("key", ["chosen", "rewrites"])
def test_a_decision_that_does_not_fit_is_taken_again(folder, key):
    afresh(scores, folder, *pair())
    (path,) = folder.rglob("graph-*.json")
    read = json.loads(path.read_text())
    if key == "chosen":
        del read["data"]["rewrites"]
    else:
        read["data"]["rewrites"][0]["signature"] = "another"
    path.write_text(json.dumps(read))
    with torch._functorch.config.patch(enable_autograd_cache=False):  # the graph is to be looked at
        _, graph = afresh(scores, folder, *pair())
    assert graph.remembered == ""
    assert graph.chosen == "refold"
    assert any("does not fit" in note for note in graph.notes)


def test_a_folder_that_cannot_be_written_costs_nothing_but_a_note(tmp_path):
    occupied = tmp_path / "file"
    occupied.write_text("")
    _, graph = afresh(scores, occupied, *pair())
    assert graph.chosen == "refold"
    assert any("not kept on disk" in note or "is ignored" in note for note in graph.notes)


def test_off_means_off(tmp_path, monkeypatch):
    monkeypatch.setenv("REFOLD_CACHE", str(tmp_path / "named"))
    assert default_folder() == tmp_path / "named"
    afresh(scores, False, *pair())
    assert not (tmp_path / "named").exists()
    monkeypatch.setenv("REFOLD_CACHE", "off")
    assert default_folder() is None
    monkeypatch.delenv("REFOLD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "refold"
    with pytest.raises(ArgumentError, match="cache must be True, False or a folder, not 3"):
        refold.compile(scores, cache=3)


def test_a_home_that_is_not_known(monkeypatch):
    def unknown(*_):
        raise KeyError("planted")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    for name in ("HOME", "REFOLD_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert default_folder() is None
    monkeypatch.setenv("REFOLD_CACHE", "~nobody-here/refold")
    with pytest.raises(ArgumentError, match="REFOLD_CACHE names '~nobody-here/refold', a home that is not known"):
        default_folder()
    with pytest.raises(ArgumentError, match="cache names '~nobody-here'"):
        refold.compile(scores, cache="~nobody-here")


def test_the_folder_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "LIMIT", 20_000)
    kept = Store(tmp_path, "place")
    (tmp_path / "numba" / "code").mkdir(parents=True)  # the oldest
    for i in range(50):
        kept.put("graph", str(i), "x" * 1000)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 25_000
    assert kept.notes == []
    forget()
    assert kept.get("graph", "49") == ("x" * 1000, "the disk")


def test_a_reader_never_sees_half_a_file(tmp_path, monkeypatch):
    kept = Store(tmp_path, "place")
    kept.put("graph", "a", "first")

    def interrupted(*args):
        raise OSError("planted")

    monkeypatch.setattr(store.os, "replace", interrupted)
    kept.put("graph", "a", "second")
    forget()
    assert kept.get("graph", "a") == ("first", "the disk")
    assert kept.notes == ["decisions are not kept on disk: planted"]
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["graph-a.json"]


def test_somebody_elses_code_has_no_name(folder):
    @torch.library.custom_op("somebody::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    twice.register_fake(torch.empty_like)
    for _ in range(2):
        _, graph = afresh(lambda x, y: twice(scores(x, y)), folder, *pair())
        assert graph.chosen == "refold"
        assert (graph.program, graph.remembered) == ("", "")
    with pytest.raises(Unnameable, match="plain data"):
        name_program(torch.fx.symbolic_trace(lambda x: x), [torch.ones(2)], {"options": object()})


@pytest.mark.exhaustive
def test_another_process_replays(folder):
    code = textwrap.dedent(
        f"""
        import torch, refold
        def loop(a, x):
            h, ys = x[:, 0], []
            for t in range(x.shape[1]):
                h = a[:, t] * h + x[:, t]
                ys.append(h)
            return torch.stack(ys, 1)
        torch.manual_seed(0)
        compiled = refold.compile(loop, accept="always", strict=True, cache={str(folder)!r})
        print(compiled(torch.rand(2, 20, 3), torch.randn(2, 20, 3)).sum().item())
        print(compiled.report.graphs[0].remembered or "nobody")
        print(torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"])
        """
    )
    own = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=own) for _ in range(2)]
    (a, *first), (b, *second) = (run.stdout.splitlines() for run in runs)
    assert a == b
    # The first process left what it traced and compiled to the second one.
    assert (first, second) == (["nobody", "0"], ["the disk", "1"])


# Machines that are busy ---------------------------------------------------------------------------


BUSY = "other programs used 1.5 of 2 cores"


def timed(monkeypatch, at_least, at_most, busy="", fastest=1.1):
    """Let every race end as told."""

    def race(base, run, device, **_):
        base(), run()
        return Timing(1.0, 1.0, 1.0, at_least, at_most, 9, at_least > 1.02, busy, fastest)

    for where in ("program", "region"):
        monkeypatch.setattr(f"refold.compiler.validate.{where}.race", race)
    monkeypatch.setattr("refold.compiler.validate.region.compile_or_none", lambda region, *args: region)  # to be timed


@pytest.fixture
def quiet(monkeypatch):
    """Tell later processes how busy the machine is."""
    crowded = [1.0]
    monkeypatch.setattr(replay, "crowding", lambda: crowded[0])
    return lambda quiet: crowded.__setitem__(0, 1.0 if quiet else 3.0)


@pytest.mark.rows(4)
@pytest.mark.parametrize("fn", [scores, ema])
@pytest.mark.parametrize("busy", [BUSY, ""])
def test_what_was_measured_slower_is_never_kept(folder, monkeypatch, fn, busy):
    """Fewer bytes (of the product) and fewer calls (of the loop) do not count then."""
    timed(monkeypatch, 0.03, 0.05, busy)
    _, graph = afresh(fn, folder, *(pair() if fn is scores else (torch.randn(2, 256, 4),)), accept="faster")
    assert graph.chosen != "refold"
    assert not graph.applied


@pytest.mark.rows(2)
@pytest.mark.parametrize(("fn", "why"), [(scores, "times fewer bytes"), (ema, "calls, and eager")])
def test_a_busy_machine_does_not_decide(folder, monkeypatch, fn, why):
    inputs = pair() if fn is scores else (torch.randn(2, 256, 4),)
    timed(monkeypatch, 0.5, 3.0, BUSY)
    _, graph = afresh(fn, folder, *inputs, accept="faster")
    assert graph.chosen == "refold"
    assert graph.provisional
    assert "too busy to tell" in graph.reason
    assert why in graph.reason
    forget()
    timed(monkeypatch, 0.5, 3.0, BUSY, fastest=2.5)
    _, graph = afresh(fn, folder / "fast", *inputs, accept="faster")
    assert "the fastest call of the original takes 2.5 times as long" in graph.reason
    timed(monkeypatch, 0.5, 3.0, BUSY, fastest=0.4)
    _, graph = afresh(fn, folder / "slow", *inputs, accept="faster")
    assert graph.chosen != "refold"
    timed(monkeypatch, 0.5, 3.0)
    _, graph = afresh(fn, folder / "quiet", *inputs, accept="faster")
    assert graph.chosen != "refold"
    assert not graph.provisional


def test_what_a_busy_machine_left_open_is_kept_and_decided_once_more(folder, monkeypatch, judged, quiet):
    timed(monkeypatch, 0.5, 3.0, BUSY)
    _, graph = afresh(scores, folder, *pair(), accept="faster")
    assert graph.chosen == "refold"
    assert "a later process decides again" in " ".join(graph.notes)
    quiet(False)
    _, graph = afresh(scores, folder, *pair(), accept="faster")
    assert graph.remembered == "the disk"  # at once, as long as it is busy
    assert judged["choose_program"] == 1
    quiet(True)
    timed(monkeypatch, 0.5, 1.5, BUSY)
    _, graph = afresh(scores, folder, *pair(), accept="faster")
    assert graph.remembered == ""
    assert judged == {"validate_region": 1, "choose_program": 2}  # what was checked is not checked again
    assert not graph.provisional
    _, graph = afresh(scores, folder, *pair(), accept="faster")
    assert graph.remembered == "the disk"  # not more than twice, whatever came of it


def test_what_was_certain_on_a_busy_machine_stays_decided(folder, monkeypatch, quiet):
    timed(monkeypatch, 1.5, 3.0, BUSY)
    _, graph = afresh(scores, folder, *pair(), accept="faster")
    assert not graph.provisional
    quiet(True)
    _, graph = afresh(scores, folder, *pair(), accept="faster")
    assert graph.remembered == "the disk"


def test_a_region_that_was_checked_on_a_busy_machine_is_not_checked_again(folder, monkeypatch, quiet):
    checks = []
    real = region.check
    monkeypatch.setattr(region, "check", lambda *args, **more: checks.append(1) or real(*args, **more))
    timed(monkeypatch, 0.5, 0.9, BUSY)
    _, graph = afresh(scores, folder, *pair(), accept="faster")
    assert graph.rewrites[0].status == "refused"
    assert graph.provisional
    quiet(True)
    timed(monkeypatch, 1.5, 3.0)
    _, graph = afresh(scores, folder, *pair(), accept="faster")
    assert graph.chosen == "refold"
    assert len(checks) == 1


# Sizes that change --------------------------------------------------------------------------------


def test_a_graph_of_microseconds_is_not_raced_for_every_length(folder, monkeypatch):
    races = []
    timed(monkeypatch, 2.0, 2.0)
    monkeypatch.setattr(replay, "TINY_MS", 1e9)
    real = session.choose_program

    def choose_program(rewritten, gm, inputs, settings, *others):
        races.append(settings.accept)
        return real(rewritten, gm, inputs, settings, *others)

    monkeypatch.setattr(session, "choose_program", choose_program)
    compiled = refold.compile(scores, cache=folder, strict=True, dynamic=False)
    for n in (33, 40, 63, 64):
        x, y = torch.randn(2, n, 16), torch.randn(2, 8, 16)
        assert torch.allclose(compiled(x, y), scores(x, y), atol=1e-5)
    assert races == ["faster", "always", "always", "faster"]
    graphs = compiled.report.graphs
    assert [graph.chosen for graph in graphs] == ["refold"] * 4
    assert all(graph.checks for graph in graphs)  # what is right is asked for each length
    assert [graph.remembered for graph in graphs] == ["", "this process", "this process", ""]


# Plans --------------------------------------------------------------------------------------------


def with_plan(fn, plan, *inputs, **options):
    torch._dynamo.reset()
    compiled = refold.compile(fn, plan=plan, **options)
    return compiled(*inputs), compiled.report.graphs[0]


def test_a_plan_is_replayed_without_races(tmp_path, monkeypatch, folder):
    inputs = pair()
    timed(monkeypatch, 2.0, 2.0)
    compiled = refold.compile(scores, cache=False, strict=True)
    first = compiled(*inputs)
    path = tmp_path / "plan.json"
    compiled.report.save(path)

    def no_race(*args, **kwargs):
        raise AssertionError("raced")

    for where in ("program", "region"):
        monkeypatch.setattr(f"refold.compiler.validate.{where}.race", no_race)
    for plan in (path, str(path), compiled.report, json.loads(path.read_text())):
        result, graph = with_plan(scores, plan, *inputs, cache=False, strict=True)
        assert torch.equal(result, first)
        assert (graph.chosen, graph.remembered) == ("refold", "a plan")
        assert graph.checks
    options = {"plan": path, "cache": False}
    torch._dynamo.reset()
    assert torch.equal(torch.compile(scores, backend="refold", options=options)(*inputs), first)


def test_a_plan_may_say_that_nothing_is_rewritten(tmp_path, monkeypatch):
    timed(monkeypatch, 0.5, 0.5)
    compiled = refold.compile(scores, cache=False, strict=True)
    compiled(*pair())
    chosen = compiled.report.graphs[0].chosen
    assert chosen in ("eager", "inductor")
    timed(monkeypatch, 2.0, 2.0)
    _, graph = with_plan(scores, compiled.report, *pair(), cache=False, strict=True)
    assert (graph.chosen, graph.applied) == (chosen, [])


def test_what_a_plan_pins_is_checked_once(folder, judged):
    compiled = refold.compile(scores, cache=False, accept="always", strict=True)
    compiled(*pair())
    for _ in range(2):
        forget()
        with_plan(scores, compiled.report, *pair(), cache=folder, accept="always", strict=True)
    assert judged == {"validate_region": 2, "choose_program": 2}


def test_a_plan_that_does_not_fit(monkeypatch):
    compiled = refold.compile(scores, cache=False, accept="always", strict=True)
    compiled(*pair())
    plan = compiled.report
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result, graph = with_plan(scores, plan, *pair(12), accept="always", cache=False)
    assert [str(w.message) for w in caught if issubclass(w.category, RefoldWarning)] == [
        "the plan does not fit graph 0: it does not hold this graph at these sizes, dtypes and options; "
        "Inductor compiles it"
    ]
    assert result.shape == (2, 12, 8)
    assert graph.chosen == "inductor"
    assert any(f"[plan-misfit]: {REASONS['plan-misfit'][1]}" in note for note in graph.notes)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"PlanError.*Make a new one"):
        with_plan(scores, plan, *pair(12), accept="always", cache=False, strict=True)
    graph = plan.graphs[0]
    other = dataclasses.replace(graph.rewrites[0], signature="another")
    plan.graphs[0] = dataclasses.replace(graph, rewrites=(other,))
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"PlanError.*is another one"):
        with_plan(scores, plan, *pair(), accept="always", cache=False, strict=True)
    plan.graphs[0] = dataclasses.replace(graph, rewrites=(dataclasses.replace(other, key="0:nowhere"),))
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"PlanError.*there is no 0:nowhere"):
        with_plan(scores, plan, *pair(), accept="always", cache=False, strict=True)


def test_a_plan_does_not_switch_off_the_check(monkeypatch):
    compiled = refold.compile(scores, cache=False, accept="always", strict=True)
    compiled(*pair())
    real = record.validate_region

    def doubtful(*args):
        verdict = real(*args)
        verdict.reason = "not equal to the original: planted"
        return verdict

    monkeypatch.setattr(record, "validate_region", doubtful)
    with pytest.warns(RefoldWarning, match="not equal to the original: planted"):
        _, graph = with_plan(scores, compiled.report, *pair(), accept="always", cache=False)
    assert graph.chosen == "inductor"


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (3, "plan must be a report or a path to one, not int"),
        ({}, r"plan is not a report \('schema'\)"),
        ({"schema": 99}, "its schema is 99, this version.s 2"),
        ("/nowhere/plan.json", "cannot be read: No such file"),
    ],
)
def test_what_is_no_plan_is_refused_at_once(plan, message):
    with pytest.raises(ArgumentError, match=message):
        refold.compile(scores, plan=plan)


def test_layers_of_a_module_share_what_is_known(folder, judged):
    class Layer(nn.Module):
        def forward(self, x, y):
            x = x + scores(x, y) @ y
            torch._dynamo.graph_break()
            return x.sin() + scores(x, y) @ y

    compiled = refold.compile(Layer(), cache=folder, accept="always", strict=True)
    compiled(*pair())
    assert len(compiled.report.graphs) >= 2
    assert judged["validate_region"] == 1


def test_names_do_not_depend_on_values():
    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    names = {name_program(gm, [torch.randn(3)], {}).exact for _ in range(2)}
    assert len(names) == 1
    gm.register_buffer("held", torch.ones(2))
    node = next(node for node in gm.graph.nodes if node.op == "call_function")
    with gm.graph.inserting_before(node):
        node.args = (node.args[0], gm.graph.get_attr("held"))
    one = name_program(gm, [torch.randn(2)], {}).exact
    gm.held = torch.zeros(2)
    assert name_program(gm, [torch.randn(2)], {}).exact != one


def test_code_that_is_not_in_the_graph_has_no_name():
    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    node = next(node for node in gm.graph.nodes if node.op == "call_function")
    node.target = torch._higher_order_ops.triton_kernel_wrap.triton_kernel_wrapper_mutation
    with pytest.raises(Unnameable, match="not in the graph"):
        name_program(gm, [torch.ones(2)], {})
    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    with pytest.raises(Unnameable, match="sparse"):
        name_program(gm, [torch.ones(2, 2).to_sparse()], {})


def test_ranks_have_one_name():
    names = set()
    for device in ("cuda:0", "cuda:1"):
        gm = torch.fx.symbolic_trace(lambda x: x.to("meta"))
        next(node for node in gm.graph.nodes if node.op == "call_method").update_arg(1, torch.device(device))
        names.add(name_program(gm, [torch.ones(2)], {}).exact)
    assert len(names) == 1
