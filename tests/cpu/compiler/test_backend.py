"""The backend end to end: right for every kind of module, safe if refold fails, and its report is true."""

import json
import re
import warnings

import pytest
import torch
import torch.nn as nn
from torch._higher_order_ops import while_loop

import refold
from refold.compiler import pipeline
from refold.compiler.refusals import REASONS
from refold.compiler.validate import program, region
from refold.errors import ArgumentError, RefoldWarning
from refold.verify.timing import Timing

ALWAYS = {"accept": "always", "strict": True}


def scores(x, y):
    return (x[:, :, None] * y[:, None]).sum(-1)


def pair(*lead, dtype=torch.float32):
    return torch.randn(*lead, 9, 16, dtype=dtype), torch.randn(*lead, 8, 16, dtype=dtype)


def close(a, b, terms=16):
    bound = (8 + terms**0.5 / 2) * 2.0**-24 * 8
    assert torch.allclose(a, b, rtol=bound, atol=bound * float(b.abs().max()))


def test_registered_as_a_torch_compile_backend():
    x, y = pair(2)
    compiled = torch.compile(scores, backend="refold", fullgraph=True, options=ALWAYS)
    close(compiled(x, y), scores(x, y))
    assert "refold" in torch._dynamo.list_backends()


def test_report_holds_the_evidence():
    compiled = refold.compile(scores, **ALWAYS)
    compiled(*pair(2))
    (graph,) = compiled.report.graphs
    (rewrite,) = graph.applied
    assert graph.chosen == "refold"
    assert rewrite.source.endswith("return (x[:, :, None] * y[:, None]).sum(-1)")
    assert {error["kind"] for error in rewrite.errors} == {"actual", "normal", "integers", "infinities"}
    assert all(error["passed"] for error in rewrite.errors)
    assert rewrite.bytes_after < rewrite.bytes_before
    assert json.loads(compiled.report.to_json())["graphs"][0]["rewrites"][0]["status"] == "applied"
    assert "recover contraction" in str(compiled.report)


@pytest.mark.parametrize("faster", [True, False])
def test_only_what_is_faster_is_kept(faster, monkeypatch):
    """Which of the two is faster is planted."""

    def race(base, run, device, **_):
        return Timing(1.0, 0.5, 2.0, 2.0, 2.0, 9, True) if faster else Timing(0.5, 1.0, 0.5, 0.5, 0.5, 9, False)

    monkeypatch.setattr(program, "race", race)
    monkeypatch.setattr(region, "race", lambda *args, **_: Timing(1.0, 0.5, 2.0, 2.0, 2.0, 9, True))
    compiled = refold.compile(scores, strict=True, cache=False)
    x, y = pair(2)
    close(compiled(x, y), scores(x, y))
    (graph,) = compiled.report.graphs
    (row,) = graph.rewrites
    assert (graph.chosen == "refold") == faster
    assert row.status == ("applied" if faster else "refused")
    assert faster or f"[graph-slower]: {REASONS['graph-slower'][1]}" in row.reason
    assert re.match(rf"{re.escape(__file__)}:\d+: return", row.source)


@pytest.mark.codegen
def test_a_changed_length_gives_right_results():
    compiled = refold.compile(scores, dynamic=True, **ALWAYS)
    for length in (5, 7, 12, 1, 31):
        x, y = torch.randn(2, length, 16), torch.randn(2, length + 3, 16)
        close(compiled(x, y), scores(x, y))
    assert len(compiled.report.graphs) <= 2  # length 1 is a graph of its own


def test_a_batch_size_that_changes_from_static_to_dynamic():
    compiled = refold.compile(scores, **ALWAYS)
    for batch in (2, 3, 5, 1, 0):
        x, y = pair(batch)
        close(compiled(x, y), scores(x, y)) if batch else compiled(x, y)


@pytest.mark.codegen
def test_training_matches_eager():
    layer = nn.Linear(16, 16)

    def loss(x, y):
        return scores(layer(x), y).tanh().sum()

    x, y = (v.requires_grad_() for v in pair(2))
    expected = torch.autograd.grad(loss(x, y), [x, y, *layer.parameters()])
    compiled = refold.compile(loss, **ALWAYS)
    for a, b in zip(torch.autograd.grad(compiled(x, y), [x, y, *layer.parameters()]), expected, strict=True):
        close(a, b, terms=256)
    assert compiled.report.graphs[0].mode == "training"
    assert len(compiled.report.graphs[0].applied) == 3


def test_training_is_raced_with_its_backward():
    x, y = (v.requires_grad_() for v in pair(2))
    compiled = refold.compile(scores, strict=True)
    compiled(x, y).sum().backward()
    assert x.grad is not None


@pytest.mark.codegen
def test_in_place_updates_and_aliases_survive():
    class Stateful(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("state", torch.zeros(2, 9, 8))

        def forward(self, x, y):
            x.mul_(2.0)
            self.state.add_(scores(x, y))
            return self.state, x

    x, y = pair(2)
    eager, ours = Stateful(), Stateful()
    compiled = refold.compile(ours, strict=True)  # proof and races must not advance the state
    for _ in range(2):
        a, b = x.clone(), x.clone()
        expected, got = eager(a, y), compiled(b, y)
        close(got[0], expected[0])
        close(ours.state, eager.state)
        assert torch.equal(a, b)
        assert got[1].data_ptr() == b.data_ptr()


@pytest.mark.codegen
def test_dropout_is_not_crossed_and_the_random_state_is_not_disturbed():
    def fn(x, y):
        return torch.nn.functional.dropout(scores(x, y), 0.5)

    x, y = pair(2)
    torch.manual_seed(1)
    refold.compile(fn, strict=True, accept="always")(x, y)
    after_ours = torch.rand(3)
    torch._dynamo.reset()
    torch.manual_seed(1)
    torch.compile(fn)(x, y)  # eager draws other numbers than Inductor
    assert torch.equal(after_ours, torch.rand(3))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_values_appear_where_they_do_in_eager(poison):
    x, y = pair(2)
    x[1, 3, 5] = poison
    expected, got = scores(x, y), refold.compile(scores, **ALWAYS)(x, y)
    assert torch.equal(got.isfinite(), expected.isfinite())
    close(got.nan_to_num(0, 0, 0), expected.nan_to_num(0, 0, 0))


def test_autocast():
    layer = nn.Linear(16, 16)

    def fn(x, y):
        return scores(layer(x), layer(y))

    x, y = pair(2)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        expected, got = fn(x, y), refold.compile(fn, strict=True)(x, y)
    assert got.dtype == expected.dtype == torch.bfloat16
    assert float((got.double() - expected.double()).norm() / expected.double().norm()) < 8 * 2.0**-8


def test_graph_breaks_give_one_entry_a_graph():
    def fn(x, y):
        z = scores(x, y)
        torch._dynamo.graph_break()
        return scores(z, z)

    x, y = pair(2)
    compiled = refold.compile(fn, **ALWAYS)
    close(compiled(x, y), fn(x, y))
    assert len(compiled.report.graphs) == 2


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
def test_integer_and_complex_dtypes_pass_through():
    for x in (torch.randint(9, (4, 6)), torch.randn(4, 6, dtype=torch.complex64)):
        got = refold.compile(lambda x: (x[:, None] * x[None]).sum(-1), **ALWAYS)(x)
        assert torch.allclose(got, (x[:, None] * x[None]).sum(-1))


def test_a_wrong_rewrite_is_dropped_and_named(monkeypatch):
    def wrong(graph, *args, **kwargs):
        rewrites = honest(graph, *args, **kwargs)
        for rewrite in rewrites:
            _break(rewrite.candidate)
        return rewrites

    def _break(gm):
        output = next(iter(gm.graph.find_nodes(op="output")))
        with gm.graph.inserting_before(output):
            new = gm.graph.call_function(torch.ops.aten.mul.Tensor, (output.args[0], 1.001))
        new.meta = dict(output.args[0].meta)
        output.args = (new,)
        gm.recompile()

    honest = pipeline.run
    monkeypatch.setattr(pipeline, "run", wrong)
    x, y = pair(2)
    compiled = refold.compile(scores, **ALWAYS)
    close(compiled(x, y), scores(x, y))
    (rewrite,) = compiled.report.rewrites
    assert rewrite.status == "refused"
    assert "not equal to the original" in rewrite.reason
    assert compiled.report.graphs[0].chosen == "inductor"


def test_when_refold_fails_inductor_runs_with_one_warning(monkeypatch):
    def broken(*args, **kwargs):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(pipeline, "run", broken)
    x, y = pair(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = refold.compile(scores)
        close(compiled(x, y), scores(x, y))
    ours = [w for w in caught if issubclass(w.category, RefoldWarning)]
    assert len(ours) == 1
    assert "planted" in str(ours[0].message)
    assert "refold doctor" in str(ours[0].message)
    assert any(f"[refold-failed]: {REASONS['refold-failed'][1]}" in note for note in compiled.report.graphs[0].notes)
    assert compiled.report.graphs[0].chosen == "inductor"


def test_strict_raises_refolds_own_error(monkeypatch):
    def broken(*args, **kwargs):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(pipeline, "run", broken)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"CompileError.*planted"):
        refold.compile(scores, strict=True)(*pair(2))


def by_mask(x, mask):
    h = x * 2
    h[mask] = x[0]
    return h


def by_while(x, mask):
    return while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, h * 0.5 + x), (torch.tensor(0), x * 1.0))[1]


@pytest.mark.rows(2)
@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch's own words about the same
@pytest.mark.parametrize(("fn", "said"), [(by_mask, "torch.where(mask, y, h)"), (by_while, "fixed number of steps")])
def test_what_numbers_decide_in_training_is_named_and_nothing_to_report(fn, said):
    x, mask = torch.randn(6, 3, requires_grad=True), torch.rand(6) < 0.5
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        refold.compile(fn, strict=True)(x, mask)
    assert "test_backend.py:" in str(caught.value)
    assert said in str(caught.value)
    assert "report this" not in str(caught.value)
    torch._dynamo.reset()
    compiled = refold.compile(fn)
    with pytest.warns(RefoldWarning, match=re.escape(said)):
        got = compiled(x, mask)
    close(got.detach(), fn(x.detach(), mask))
    assert said in compiled.report.graphs[0].notes[-1]


@pytest.mark.parametrize(("option", "got"), [("verify", "slow"), ("accept", "maybe"), ("strict", "yes")])
def test_unknown_option_values_are_refused(option, got):
    with pytest.raises(ArgumentError, match=f"{option} must be one of .* not '{got}'"):
        refold.compile(scores, **{option: got})


def test_explain_changes_nothing_and_names_waste():
    x, y = pair(2)
    report = refold.explain(scores, x, y)
    (rewrite,) = report.rewrites
    assert rewrite.status == "found"
    assert rewrite.why == "products are written out only to be summed"
    assert rewrite.flops_before >= rewrite.flops_after > 0


def test_explain_names_serial_loops():
    def loop(a, x):
        h = torch.zeros_like(x[:, 0])
        out = []
        for t in range(12):
            h = a[:, t] * h + x[:, t]
            out.append(h)
        return torch.stack(out, 1)

    report = refold.explain(loop, torch.rand(2, 12, 3), torch.randn(2, 12, 3))
    (found,) = report.graphs[0].loops
    assert "h = a[:, t] * h + x[:, t]" in found
    assert "12 steps" in found


def test_explain_counts_what_a_captured_loop_costs():
    """The loop is a scan already where the rest of the graph is counted."""

    def loop(a, x):
        h, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = torch.sigmoid(a) * h + x[:, t]
            out.append(h)
        return torch.stack(out, 1)

    (graph,) = refold.explain(loop, torch.rand(3), torch.randn(2, 40, 3)).graphs
    (row,) = graph.rewrites
    assert "h = torch.sigmoid(a) * h + x[:, t]" in row.source
    assert graph.flops_before - graph.flops_after == row.flops_before - row.flops_after > 0
    assert graph.bytes_before - graph.bytes_after == row.bytes_before - row.bytes_after != 0


@pytest.mark.codegen
def test_matmuls_survive_inductor():
    import torch._inductor.config as config

    survivors = []

    class Count(torch._inductor.custom_graph_pass.CustomGraphPass):
        def __call__(self, graph):
            survivors.extend(n for n in graph.nodes if "mm" in str(n.target))

        def uuid(self):
            return None

    with config.patch(fx_graph_cache=False, post_grad_custom_post_pass=Count()):
        refold.compile(scores, verify="off", accept="always", strict=True)(*pair(2))
    assert survivors


def test_inputs_of_other_kinds_are_left_to_inductor():
    """Nested tensors have sizes that no number stands for; tensors of the device meta have nothing to check."""
    nested = torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(5, 4)], layout=torch.jagged)
    compiled = refold.compile(lambda x: x.sin() * 2, strict=True)
    torch.testing.assert_close(compiled(nested).values(), nested.values().sin() * 2)
    assert "nested" in str(compiled.report)
    compiled = refold.compile(lambda x: x.cumsum(1) * 2, strict=True)
    assert compiled(torch.empty(2, 3, device="meta")).is_meta
    assert "only a shape" in str(compiled.report)


def test_views_that_are_negated_when_they_are_read():
    """Inductor reads the memory of one, which holds the numbers with the other sign."""
    compiled = refold.compile(lambda x: x.exp() + 1, strict=True, verify="off", accept="always")
    plain = torch.randn(3, 4)
    view = torch.complex(plain, plain).conj().imag
    assert view.is_neg()
    for x in (plain, view):
        torch.testing.assert_close(compiled(x), x.exp() + 1)
    assert "negated view" in str(compiled.report)


@pytest.mark.rows(2)
@pytest.mark.parametrize("training", [False, True])
def test_a_graph_that_enters_inference_mode_runs_eagerly(training):
    """AOTAutograd raises there, and leaves the process unable to compute."""

    def fn(x, y):
        with torch.inference_mode():
            h = torch.zeros_like(x[:, 0])
            for t in range(20):
                h = h * 0.5 + x[:, t]
        return y * 2, h

    x, y = torch.randn(2, 20, 3), torch.randn(3, requires_grad=training)
    compiled = refold.compile(fn, strict=True)
    for expected, result in zip(fn(x, y), compiled(x, y), strict=True):
        torch.testing.assert_close(result, expected)
        assert (result.is_inference(), result.requires_grad) == (expected.is_inference(), expected.requires_grad)
    assert "inference mode" in str(compiled.report)
    with torch.inference_mode():
        torch.testing.assert_close(refold.compile(lambda x: x.exp() + 1, strict=True)(x), x.exp() + 1)
