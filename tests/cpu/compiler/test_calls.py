"""The arguments of `refold.compile` and `refold.explain`, and the callables that they return."""

import copy
import io
import sys
import warnings

import pytest
import torch

import refold
from refold.compiler import engine


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)


def test_errors_are_an_attribute_of_the_package():
    assert refold.errors.RefoldError in refold.errors.ArgumentError.__mro__


@pytest.mark.parametrize("call", [refold.compile, refold.explain])
@pytest.mark.parametrize(("module", "says"), [(Layer, r"the class Layer; pass Layer\(...\)"), (3, "not int")])
def test_what_is_no_module_and_no_function(call, module, says):
    with pytest.raises(refold.errors.ArgumentError, match=says):
        call(module)


def test_unknown_options_and_modes_are_refused_as_by_torch_compile():
    with pytest.raises(refold.errors.ArgumentError, match=r"unexpected option 'verifyy': .* did you mean verify"):
        refold.compile(Layer(), options={"verifyy": "off"})
    with pytest.raises(refold.errors.ArgumentError, match=r"mode must be one of 'default', .* not 'fast'"):
        refold.compile(Layer(), mode="fast")
    refold.compile(Layer(), options={"max_autotune": False, "triton.cudagraphs": False})
    with pytest.raises(Exception, match="unexpected option 'verifyy'"):
        torch.compile(Layer(), backend="refold", options={"verifyy": "off"})(torch.ones(2, 4))


def test_without_a_module_compile_is_a_decorator():
    @refold.compile(verify="off")
    def twice(x):
        return 2 * x

    assert twice(torch.ones(2)).tolist() == [2.0, 2.0]
    assert len(twice.report.graphs) == 1
    with pytest.raises(refold.errors.ArgumentError, match="verify must be"):
        refold.compile(verify="perhaps")


def frames(call, *args):
    """Return the names of the functions of Python that a call runs when it is compiled, in order."""
    call(*args)
    names = []
    sys.setprofile(lambda frame, event, _: names.append(frame.f_code.co_name) if event == "call" else None)
    try:
        call(*args)
    finally:
        sys.setprofile(None)
    return names


def steps(x):
    for _ in range(12):
        x = torch.sin(x) @ x
    return x


# What comes from AOTAutograd's cache on disk is wrapped in another way than what was compiled just now.
@pytest.mark.codegen
@torch._functorch.config.patch(enable_autograd_cache=False)
@pytest.mark.parametrize(
    ("fn", "options", "chosen", "backend"),
    [(Layer(), {}, "inductor", "inductor"), (steps, {"compile_budget": 1e-9}, "eager", "eager")],
)
def test_where_nothing_is_rewritten_a_call_costs_what_it_costs_without_refold(fn, options, chosen, backend):
    x = torch.ones(4, 4)
    compiled = refold.compile(fn, cache=False, **options)
    with torch.no_grad():
        own, rival = frames(compiled, x), frames(torch.compile(fn, backend=backend), x)
    assert compiled.report.graphs[-1].chosen == chosen
    assert own == rival
    torch.compiler.reset()
    # AOTAutograd wraps once more what it has compiled with its backward.
    own, rival = frames(compiled, x), frames(torch.compile(fn, backend=backend), x)
    assert len(own) <= len(rival) + 1


def test_a_number_in_double_precision():
    """Of a graph that takes one, PyTorch may ask that it is traced again."""
    x, a = torch.ones(3, 4, dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64)
    compiled = refold.compile(lambda x, a: 2 * x * a, cache=False, strict=True)
    torch.testing.assert_close(compiled(x, a), x)
    assert len(compiled.report.graphs) == 1


def saved(compiled):
    file = io.BytesIO()
    torch.save(compiled, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("again", [copy.deepcopy, saved])
def test_copies_and_pickles_compile_for_themselves(again):
    layer, x = Layer(), torch.randn(2, 4)
    compiled = refold.compile(layer, verify="off")
    assert isinstance(compiled, type(torch.compile(layer)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of PyTorch's own pickling
        before, other = compiled(x), again(compiled)
    assert len(other.report.graphs) == 1
    other.linear.bias.data += 1
    assert torch.allclose(other(x), before + 1)
    assert torch.equal(compiled(x), before)
    assert len(compiled.report.graphs) == 1


def test_warnings_point_at_the_users_line(monkeypatch):
    def fail(*_):
        raise RuntimeError("planted")

    monkeypatch.setattr(engine, "Remembering", fail)
    with pytest.warns(refold.errors.RefoldWarning, match="planted") as caught:
        refold.compile(lambda x: 2 * x)(torch.ones(3))
    assert caught[0].filename == __file__


def nonlinear(x, y, first):
    h, out = torch.zeros_like(x[:, 0]), []
    for t in range(first, x.shape[1]):
        h = torch.tanh(h + x[:, t] - y[t - 2])
        out.append(h)
    return torch.stack(out, 1)


def test_a_loop_that_runs_eagerly_reads_every_item_of_several_tensors():
    torch._dynamo.reset()
    x, y = torch.randn(2, 34, 3), torch.randn(34, 3)
    run = refold.compile(nonlinear, compile_budget=1e-3)
    torch.testing.assert_close(run(x, y, 0), nonlinear(x, y, 0), rtol=0, atol=0)
    assert run.report.graphs[-1].chosen == "eager"


def test_a_loop_that_runs_eagerly_takes_no_more_operations_than_the_users():
    torch._dynamo.reset()
    x, y = torch.randn(2, 34, 3), torch.randn(34, 3)
    run, calls, results = refold.compile(nonlinear, compile_budget=1e-3), [], []
    run(x, y, 2)
    assert run.report.graphs[-1].chosen == "eager"
    for each in (nonlinear, run):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            results.append(each(x, y, 2))
        calls.append(sorted(event.name for event in profile.events() if event.name.startswith("aten::")))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    assert len(calls[1]) <= len(calls[0])
    assert calls[1].count("aten::tanh") == 32
