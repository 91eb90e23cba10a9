"""Rewrites before autograd: chunked scans, contracted states, convolutions and norms, with gradients and without."""

import dataclasses
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import refold
from refold.compiler import early_rewrites
from refold.compiler.dynamo import before_autograd, captures_loops
from refold.compiler.dynamo.before_autograd import BeforeAutograd, find_rewrites
from refold.compiler.dynamo.to_aten import to_aten
from refold.compiler.inductor import clone_inputs
from refold.compiler.ir.evaluate import values_at
from refold.compiler.options import Options
from refold.compiler.passes import fuse_chunked_scans, replace_causal_convolutions, replace_gated_norms
from refold.compiler.refusals import REASONS
from refold.compiler.validate.region import validate_region
from refold.ops.spec import LARGEST_FLOAT
from refold.ops.torch.registry import Operation
from support.chunked import (
    GROUPS,
    HEADS,
    NEAR_MISSES,
    SPELLINGS,
    Listing,
    difference,
    inputs,
    multiplied,
    repeat_groups,
)
from support.scans import Described
from support.trained import inferred, trained
from support.trial import no_code

pytestmark = pytest.mark.rows(16)

SCAN = "fuse chunked scan"
SKIP = "absorb skip"
CONVOLUTION = "replace causal convolution"
NORM = "replace gated norm"


def names(entry):
    return [row.name for row in entry.rewrites]


def differentiable(*tensors):
    return [x.requires_grad_() for x in tensors]


def softplus(listing):
    """Take log decays of which the derivative is as small as they are."""
    return lambda x, a, B, C: listing(x, -F.softplus(a), B, C)


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [1e-6, 1.0, 30.0])
def test_log_decays_of_any_size_have_exact_gradients_in_training(size):
    """Near zero their gradients would be lost if x were divided by them."""
    x, a, B, C = inputs()
    scan = Listing()
    entry, error = trained(lambda x, decays, B, C: scan(x, decays, B, C), *differentiable(x, -size * a.abs(), B, C))
    assert SCAN in names(entry)
    assert error < 8


def test_the_last_state_alone():
    entry, error = trained(lambda *args: Listing()(*args)[1], *differentiable(*inputs()))
    assert names(entry) == ["contract last state"]
    assert error < 8


@pytest.mark.parametrize("listing", [*NEAR_MISSES.values()][::3], ids=[*NEAR_MISSES][::3])
def test_near_misses_stay(listing):
    entry, error = trained(listing, *differentiable(*inputs()))
    assert SCAN not in names(entry)
    assert error < 8


@pytest.mark.exhaustive
@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    needs=st.lists(st.booleans(), min_size=5, max_size=5).filter(any),
    chunk=st.sampled_from([2, 3, 4]),
    chunks=st.integers(1, 4),
    groups=st.sampled_from([1, GROUPS, HEADS]),
    spelling=st.sampled_from(sorted(SPELLINGS.keys() - {"chunk_of_two", "chunk_of_six", "one_chunk"})),
    steps=st.sampled_from(["softplus", "exp", "raw"]),
    apart=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_gradients_of_random_layers(needs, chunk, chunks, groups, spelling, steps, apart, seed):
    """Any of the arguments may need a gradient; steps may be part of the input or not."""
    listing = dataclasses.replace(SPELLINGS[spelling], chunk=chunk)

    def layer(x, dt, A, B, C):
        dt = {"softplus": F.softplus, "exp": torch.exp}.get(steps, lambda v: v)(dt)
        x = x if apart else x * dt[..., None]
        return listing(x, -dt * torch.exp(A), repeat_groups(B), repeat_groups(C))[0]

    torch.manual_seed(seed)
    x, dt, B, C = inputs(chunk * chunks, groups)
    args = [v.requires_grad_(need) for v, need in zip((x, 0.5 * dt, torch.randn(HEADS), B, C), needs, strict=True)]
    entry, error = trained(layer, *args)
    assert SCAN in names(entry)
    assert error < 16


def found_in(fn, *args):
    """Return the last rewrite that is found, and the values that it gets."""
    found = []

    @captures_loops
    def backend(gm, given):
        rewrite = find_rewrites(gm, (), lambda _: True, []).rewrites[-1]
        values = values_at(gm.graph, rewrite.inputs, clone_inputs(given))
        found.extend([rewrite, [values[name] for name in rewrite.inputs]])
        return gm

    torch._dynamo.reset()
    torch.compile(fn, backend=backend, fullgraph=True)(*args)
    return found


def stepped(x, dt, A, B, C, apart=False):
    """Steps are nowhere negative, and may have nothing to do with the inputs."""
    dt = F.softplus(dt)
    return Listing()(x if apart else x * dt[..., None], -dt * torch.exp(A), B, C)[0]


def step_inputs():
    x, dt, B, C = inputs()
    return differentiable(x, dt, torch.randn(HEADS), B, C)


def test_what_is_known_to_stand_is_found_without_a_run_for_gradients(monkeypatch):
    runs, found = [], []
    real = before_autograd._Keeping.run
    monkeypatch.setattr(before_autograd._Keeping, "run", lambda *args: (runs.append(1), real(*args))[1])

    def backend(gm, _):
        for known in (False, True):
            rewrites = find_rewrites(gm, (), lambda _: True, [], known).rewrites
            found.append([(rewrite.site, rewrite.signature) for rewrite in rewrites])
            runs.append(0)
        return gm

    torch._dynamo.reset()
    torch.compile(stepped, backend=backend, fullgraph=True)(*step_inputs())
    assert found[0]
    assert found[0] == found[1]
    assert runs == [1, 1, 0, 1, 0]


@pytest.mark.parametrize("apart", [False, True])
def test_steps_that_are_nowhere_negative_are_said_to_be_so(apart):
    """Some kernels of the operator need that."""
    rewrite, actual = found_in(partial(stepped, apart=apart), *step_inputs())
    (scan,) = rewrite.candidate.graph.find_nodes(op="call_function", target=torch.ops.refold.ssd.default)
    assert list(scan.args[11]) == [0.0, LARGEST_FLOAT]
    # Inputs that are divided by small steps lose digits of their gradients: that may be refused.
    assert apart or validate_region(rewrite, actual, Options(accept="always")).reason == ""


def test_the_check_takes_gradients(monkeypatch):
    """A planted bug: steps are clipped, which changes gradients more than results."""
    monkeypatch.setattr(fuse_chunked_scans, "step_limits", lambda steps: (0.3, torch.inf))
    assert "not equal" in validate_region(*found_in(stepped, *step_inputs()), Options(accept="always")).reason


def detached_decays(x, a, B, C):
    return Listing(between=lambda a: difference(a.detach()))(x, a, B, C)[0]


def decays_without_gradients(x, a, B, C):
    def between(a):
        with torch.no_grad():
            return difference(a)

    return Listing(between=between)(x, a, B, C)[0]


def keys_changed_in_place(x, a, B, C):
    B = B * 1
    B.mul_(2)
    return Listing()(x, a, B, C)[0]


def decays_changed_later(x, a, B, C):
    a = a * 1
    y = Listing()(x, a, B, C)[0]
    a.add_(1)
    return y + a.mean()


def detached_values(x, a, B, C):
    return Listing()(x.detach(), a, B, C)[0] + x


def keys_detached_and_changed(x, a, B, C):
    B = (B * 1).detach()
    B.mul_(2)
    return Listing()(x, a, B, C)[0]


STAYS = {
    detached_decays: ("detached", "detach"),
    keys_detached_and_changed: ("detached", "`(B * 1).detach()`"),
    detached_values: ("detached", "`x.detach()`"),
    decays_without_gradients: ("detached", "`total`"),
    decays_changed_later: ("in-place", "`a` is changed in place: `a.add_(1)`"),
}


def test_what_is_written_before_it_is_read_is_no_reason():
    entry, error = trained(softplus(keys_changed_in_place), *differentiable(*inputs()))
    assert SCAN in names(entry)
    assert error < 8


@pytest.mark.parametrize(("fn", "why"), STAYS.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_what_autograd_sees_otherwise_stays(fn, why):
    entry, error = trained(softplus(fn), *differentiable(*inputs()))
    assert SCAN not in names(entry)
    assert error < 8
    (id, name) = why
    said = next(note for note in entry.notes if "stays as it is" in note)
    assert f"[{id}]: {REASONS[id][1]}" in said
    assert name in said
    assert re.search(r"(test_before_autograd|chunked)\.py:\d+: ", said)


@pytest.mark.parametrize("id", ["no-place", "not-traced"])
def test_what_has_no_place_or_cannot_be_traced(id, monkeypatch):
    """Both are planted."""
    if id == "no-place":
        reason = BeforeAutograd._reason
        monkeypatch.setattr(BeforeAutograd, "_reason", lambda self, inputs, roots: reason(self, inputs, []))
    else:
        monkeypatch.setattr(before_autograd, "_trace", lambda *_: 1 / 0)
    torch._dynamo.reset()
    entry = Described("training")

    @captures_loops
    def look(gm, inputs):
        entry.describe(gm)
        return gm.forward

    torch.compile(stepped, backend=look)(*step_inputs())
    (said,) = entry.notes
    assert f"[{id}]: {REASONS[id][1]}" in said
    assert "ZeroDivisionError" in said or re.search(r"chunked\.py:\d+: ", said)


class Itself(torch.autograd.Function):
    """Returns what it is given; its backward is not the derivative of that."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -3 * g


class Doubling(torch.autograd.Function):
    """Returns its first argument, and doubles the second one in place."""

    @staticmethod
    def forward(ctx, x, y):
        y.mul_(2)
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return -3 * g, None


def values_of_a_function(x, a, B, C):
    return Listing()(Itself.apply(x), a, B, C)[0]


def function_of_a_result(x, a, B, C):
    return Itself.apply(Listing()(x, a, B, C)[0])


def values_with_and_without_a_function(x, a, B, C):
    return Listing()(Itself.apply(x), a, B, C)[0], Listing()(x, a, B, C)[0]


def loop_over_values_of_a_function(x, a, B, C):
    h, states = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = torch.exp(a[:, t, :, None]) * h + x[:, t]
        states.append(h)
    return Listing()(Itself.apply(torch.stack(states, 1)), a, Itself.apply(B), C)[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "fn",
    [values_of_a_function, function_of_a_result, values_with_and_without_a_function, loop_over_values_of_a_function],
)
def test_autograd_functions_keep_their_backward(fn):
    entry, error = trained(softplus(fn), *differentiable(*inputs(24)))
    assert SCAN in names(entry)
    assert (fn is loop_over_values_of_a_function) == ("roll up loop" in names(entry))
    assert not entry.notes
    assert error < 8


@pytest.mark.parametrize("through", [False, True])
def test_what_reaches_through_an_autograd_function_stays(through):
    """It may change what it is given, and its backward is its own."""

    def layer(x, a, B, C):
        if through:
            return Listing(between=lambda a: Itself.apply(difference(a)))(x, a, B, C)[0]
        C = 1.0 * C
        return Listing()(Doubling.apply(x, C), a, B, C)[0]

    *others, C = inputs()
    entry, error = trained(softplus(layer), *differentiable(*others), C)
    assert SCAN not in names(entry)
    assert error < 8


@pytest.mark.exhaustive
def test_checkpointed_layers():
    def model(x, *args):
        x = checkpoint(stepped, x, *args, use_reentrant=False)
        return checkpoint(stepped, x * 0.1, *args, use_reentrant=False)

    entry, error = trained(model, *step_inputs())
    assert names(entry) == [SCAN] * 2
    assert error < 8


class Layer(torch.nn.Module):
    """Projections around a chunked scan with a skip, and a short convolution."""

    def __init__(self, widen):
        super().__init__()
        self.sizes = [HEADS * 5, HEADS, 6, 6]
        self.project = torch.nn.Linear(8, sum(self.sizes))
        self.conv = torch.nn.Conv1d(sum(self.sizes), sum(self.sizes), 3, groups=sum(self.sizes), padding=2)
        self.out = torch.nn.Linear(HEADS * 5, 8)
        self.A = torch.nn.Parameter(torch.randn(HEADS))
        self.D = torch.nn.Parameter(torch.randn(HEADS))
        self.widen = widen

    def forward(self, u):
        x = self.conv(self.project(u).mT)[..., : u.shape[1]].mT
        x, dt, B, C = x.split(self.sizes, -1)
        dt = F.softplus(dt)
        A = -torch.exp(self.A.float() if self.widen else self.A)
        if self.widen:
            x, B, C = x.float(), B.float(), C.float()
        x, B, C = (v.unflatten(-1, (-1, n)) for v, n in ((x, 5), (B, 6), (C, 6)))
        steps = dt.float() if self.widen else dt
        stepped = x * (dt[..., None].float() if self.widen else dt[..., None])
        given = (stepped, A * steps, repeat_groups(B), repeat_groups(C))
        if self.widen:  # to full chunks, which they are already
            given = tuple(F.pad(v, [0, 0] * (v.dim() - 2) + [0, -v.shape[1] % 4]) for v in given)
        y = Listing(einsum=multiplied)(*given)[0] + (self.D.float() if self.widen else self.D)[:, None] * x
        return self.out(y.flatten(2).to(self.out.weight.dtype) if self.widen else y.flatten(2))


def module_of(layer):
    """Return a layer as a function of its input and its weights."""
    weights = dict(layer.named_parameters())

    def call(u, *values):
        return torch.func.functional_call(layer, dict(zip(weights, values, strict=True)), (u,))

    return call, [weight.detach().clone().requires_grad_() for weight in weights.values()]


@pytest.mark.exhaustive
def test_convolutions_are_unrolled():
    call, weights = module_of(Layer(widen=False))
    entry, error = trained(call, torch.randn(2, 12, 8), *weights)
    assert sorted(names(entry)) == [SKIP, SCAN, "unroll depthwise convolution"]
    assert error < 8


@pytest.fixture
def operators_pay(monkeypatch):
    """Replace convolutions and norms as on a GPU."""
    for module in (early_rewrites, replace_causal_convolutions, replace_gated_norms):
        monkeypatch.setattr(module, "has_pointwise_kernels", lambda device: True)


MODES = pytest.mark.parametrize("run", [trained, inferred])


@MODES
@pytest.mark.parametrize("widen", [False, True])
def test_causal_convolutions_are_operators(widen, run, operators_pay):
    """What they make has channels last, and goes to the scan as it is."""
    layer = Layer(widen=widen)
    call, weights = module_of(layer.bfloat16() if widen else layer)
    graphs = []
    u = torch.randn(2, 12, 8, dtype=weights[0].dtype)
    entry, error = run(call, u, *weights, graphs=graphs)
    assert sorted(names(entry)) == [SKIP, SCAN, CONVOLUTION]
    assert error < 8
    (scan,) = graphs[0].find_nodes(op="call_function", target=torch.ops.refold.ssd.default)
    assert scan.args[5] is not None
    assert not [i for i, x in enumerate(scan.args[:5]) if getattr(x, "target", None) is torch.ops.aten.clone.default]


def convolved(x, weight, bias, after, pad=2, input_pad=0, stop=None):
    x = F.conv1d(F.pad(x.mT, (input_pad, 0)), weight, bias, padding=pad, groups=weight.shape[0])
    return after(x[..., :stop] if stop else x)


CONVOLUTIONS = [  # keywords, what is made of the result, whether it is an operator
    ({"stop": 9}, lambda y: y.mT.square(), True),
    ({"stop": 9}, lambda y: y, True),  # leaves the graph
    ({"stop": 9}, lambda y: F.silu(y).view(2, 3, 18).square(), True),  # a view that needs time last
    ({"pad": 0, "input_pad": 2}, lambda y: F.silu(y.mT), True),
    ({"pad": 0, "input_pad": 1}, lambda y: F.silu(y), False),
    ({"stop": 8}, lambda y: F.silu(y), False),
    ({}, lambda y: F.silu(y), False),
    ({"stop": 9}, lambda y: F.silu(y) + y.flip(-1), True),
]


@MODES
@pytest.mark.parametrize(("keywords", "after", "operator"), CONVOLUTIONS)
def test_layouts_of_convolutions(keywords, after, operator, run, operators_pay):
    """Values, gradients and strides of what leaves the graph are those of eager code."""
    args = differentiable(torch.randn(2, 9, 6), torch.randn(6, 1, 3), torch.randn(6))
    found = []
    entry, error = run(partial(convolved, after=after, **keywords), *args, results=found)
    assert names(entry) == [CONVOLUTION if operator else "unroll depthwise convolution"]
    assert error < 8
    assert found[0].stride() == convolved(*args, after=after, **keywords).stride()


SILUS = [  # what is made of the result, how many operators compute a SiLU
    (lambda y: F.silu(y.mT), 1),
    (lambda y: F.silu(y).mT, 1),
    (lambda y: y * torch.sigmoid(y), 1),
    (lambda y: torch.sigmoid(y) * y, 1),
    (lambda y: F.silu(y.float()).to(y.dtype), 1),
    (lambda y: F.silu(y) + F.silu(y.mT).mT.square(), 1),  # one operator, read twice
    (lambda y: F.silu(y) * y, 0),
    (lambda y: y * torch.sigmoid(y + 1), 0),
    (lambda y: F.silu(y[:, 1:]), 0),
]


@pytest.mark.rows(4)
@pytest.mark.parametrize("run", [trained, inferred])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", SILUS)
def test_a_convolution_computes_the_silu_that_reads_it(case, dtype, run, operators_pay):
    after, silus = case
    args = differentiable(*(x.to(dtype) for x in (torch.randn(2, 9, 6), torch.randn(6, 1, 3), torch.randn(6))))
    graphs, found = [], []
    entry, error = run(partial(convolved, after=after, stop=9), *args, graphs=graphs, results=found)
    assert set(names(entry)) == {CONVOLUTION}
    operators = graphs[0].find_nodes(op="call_function", target=torch.ops.refold.causal_conv1d.default)
    assert [node.args[5] for node in operators] == (["silu"] * silus or [None])
    assert error < 8
    assert found[0].stride() == convolved(*args, after=after, stop=9).stride()


def normed(x, z, weight, kernel, norm):
    y = F.conv1d(F.pad(x.mT, (2, 0)), kernel, groups=kernel.shape[0]).mT
    return norm(y, z, weight).square()


def mean_square(v):
    return v.pow(2).mean(-1, keepdim=True)


def textbook(y, z, weight):
    v = y * F.silu(z)
    return v * torch.rsqrt(mean_square(v) + 1e-5) * weight


def widened(y, z, weight):
    """As transformers has it."""
    v = y.float() * F.silu(z.float())
    return (weight * (v * torch.rsqrt(mean_square(v) + 1e-5))).to(y.dtype)


def narrowed_before_weight(y, z, weight):
    v = (y * F.silu(z)).float()
    return weight * (v * torch.rsqrt((v * v).mean(-1, keepdim=True) + 1e-5)).to(y.dtype)


def grouped(y, z, weight):
    v = (F.silu(z) * y).unflatten(-1, (2, 3))
    return (v * torch.rsqrt(mean_square(v) + 1e-5)).flatten(-2) * weight


def weighted_after(y, z, weight):
    return textbook(y, z, weight[:1]) * weight


NORMS = [  # the norm, whether it is an operator
    (textbook, True),
    (widened, True),
    (narrowed_before_weight, True),
    (grouped, True),
    (weighted_after, False),  # one number is no weight per channel
    (lambda y, z, w: y * torch.rsqrt(mean_square(y) + 1e-5) * w, False),  # no gate
    (lambda y, z, w: y * F.silu(z) * torch.rsqrt(mean_square(y) + 1e-5) * w, False),  # of something else
    (lambda y, z, w: textbook(y, z, w) + z, True),
    (lambda y, z, w: textbook(y, z[:, :1], w), False),  # one gate for all tokens
    (lambda y, z, w: (y * F.silu(z)) * torch.rsqrt(mean_square(y * F.silu(z)) - 1e-5 + 2e-5) * w, False),
]


@pytest.mark.rows(4)
@pytest.mark.parametrize("run", [trained, inferred])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", NORMS)
def test_gated_norms_are_operators(case, dtype, run, operators_pay):
    norm, operator = case
    shapes = (2, 5, 6), (2, 5, 6), (6,), (6, 1, 3)
    args = differentiable(*(torch.randn(shape).to(dtype) for shape in shapes))
    graphs = []
    entry, error = run(partial(normed, norm=norm), *args, graphs=graphs)
    assert names(entry) == [CONVOLUTION, *[NORM] * operator]
    assert len(graphs[0].find_nodes(op="call_function", target=torch.ops.refold.gated_rmsnorm.default)) == operator
    assert error < 8


@dataclasses.dataclass(frozen=True)
class Changed(Operation):
    """An operator whose nodes have other arguments than they are given."""

    bug: dict

    def args(self, **given):
        return super().args(**{**given, **self.bug})


@pytest.mark.parametrize("bug", [{"eps": 1e-2}, {"norm_before_gate": True}, {"group_size": 3}])
def test_a_planted_bug_in_a_norm_is_refused(bug, monkeypatch, operators_pay):
    args = [torch.randn(shape) for shape in ((2, 5, 6), (2, 5, 6), (6,), (6, 1, 3))]
    monkeypatch.setattr(replace_gated_norms, "NORM", Changed(replace_gated_norms.NORM.spec, bug))
    rewrite, actual = found_in(partial(normed, norm=textbook), *differentiable(*args))
    assert rewrite.name == NORM
    assert "not equal" in validate_region(rewrite, actual, Options(accept="always")).reason


def test_a_forgotten_silu_is_refused(monkeypatch, operators_pay):
    args = differentiable(torch.randn(2, 9, 6), torch.randn(6, 1, 3), torch.randn(6))
    convolution = Changed(replace_causal_convolutions.CONVOLUTION.spec, {"activation": None})
    monkeypatch.setattr(replace_causal_convolutions, "CONVOLUTION", convolution)
    rewrite, actual = found_in(partial(convolved, after=F.silu, stop=9), *args)
    assert rewrite.name == CONVOLUTION
    assert "not equal" in validate_region(rewrite, actual, Options(accept="always")).reason


def test_a_planted_bug_in_a_convolution_is_refused(monkeypatch, operators_pay):
    monkeypatch.setattr(replace_causal_convolutions, "_is_head", lambda node, tokens, width: True)
    args = differentiable(torch.randn(2, 9, 6), torch.randn(6, 1, 3), torch.randn(6))
    rewrite, actual = found_in(lambda *a: convolved(*a, after=lambda y: y[..., 2:].mT), *args)
    assert rewrite.name == CONVOLUTION
    assert "not equal" in validate_region(rewrite, actual, Options(accept="always")).reason


@pytest.mark.exhaustive
def test_a_scan_that_was_widened_runs_in_16_bits():
    layer = Layer(widen=True).bfloat16()
    call, weights = module_of(layer)
    entry, error = trained(call, torch.randn(2, 12, 8).bfloat16(), *weights)
    assert sorted(names(entry)) == [SKIP, SCAN, "unroll depthwise convolution"]
    (scan,) = (row for row in entry.rewrites if row.name == SCAN)
    assert "in bfloat16" in scan.detail
    assert error < 8


@pytest.mark.exhaustive
def test_a_scan_in_16_bits_is_replayed(tmp_path):
    """The report names what the scan becomes, not the scan."""
    layer = Layer(widen=True).bfloat16()
    u = torch.randn(2, 12, 8).bfloat16()
    found = []
    for plan in (None, tmp_path / "plan.json"):
        torch._dynamo.reset()
        compiled = refold.compile(layer, accept="always", strict=True, cache=False, plan=plan)
        with torch.no_grad():
            found.append(compiled(u))
        compiled.report.save(tmp_path / "plan.json")
        rows = compiled.report.graphs[0].applied
        assert [row.name for row in rows] == [SCAN, SKIP, "unroll depthwise convolution"]
        assert "in bfloat16" in rows[0].detail
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.exhaustive
def test_a_result_that_stays_wide_keeps_the_scan_wide():
    def layer(x, a, B, C):
        return Listing()(x.float(), -F.softplus(a.float()), B.float(), C.float())[0]

    x, a, B, C = inputs()
    entry, error = trained(layer, *differentiable(x.bfloat16(), a, B.bfloat16(), C.bfloat16()))
    assert names(entry) == [SCAN]
    assert "bfloat16" not in entry.rewrites[0].detail
    assert error < 8


@pytest.mark.exhaustive
def test_autocast():
    call, weights = module_of(Layer(widen=False))

    def autocast(u, *values):
        with torch.autocast("cpu", torch.bfloat16):
            return call(u, *values)

    u = torch.randn(2, 12, 8)
    for fn in (autocast, partial(torch.autocast("cpu", torch.bfloat16)(call))):
        entry, error = trained(fn, u, *weights)
        assert {SCAN, SKIP} <= {*names(entry)}
        assert error < 8


def contracted(dt, A, B, C, x):
    """Collect the states in a loop, and contract them after it."""
    decay, added = torch.exp(dt[..., None] * A), dt[..., None] * B[:, :, None] * x[..., None]
    h, states = torch.zeros_like(added[:, 0]), []
    for t in range(x.shape[1]):
        h = decay[:, t] * h + added[:, t]
        states.append(h)
    return (torch.stack(states, 1) * C[:, :, None]).sum(-1)


def test_states_collected_in_a_loop_are_contracted():
    args = torch.rand(2, 16, 6), -torch.rand(6, 4), torch.randn(2, 16, 4), torch.randn(2, 16, 4), torch.randn(2, 16, 6)
    entry, error = trained(contracted, *differentiable(*args))
    assert "as one selective_scan" in entry.rewrites[-1].detail
    assert error < 8


def test_what_is_read_of_complex_sums_has_their_derivative():
    """Inductor adds complex values as bits of real ones, and an original of such a region would have no gradient."""
    with (mode := FakeTensorMode()):
        fake = torch.empty(2, 4, dtype=torch.complex64)

    def fn(x, y):
        return torch.addcmul(x, y, x) + torch.add(x, y, alpha=2)

    read = to_aten(mode, fn, fake, fake.clone(), to_read=True)
    given = [torch.randn(2, 4, dtype=torch.complex64, requires_grad=True) for _ in range(2)]
    for got, expected in zip(*(torch.autograd.grad(run(*given).abs().sum(), given) for run in (read, fn)), strict=True):
        torch.testing.assert_close(got, expected)


# Inference: passes after autograd look at what stays -----------------------------------------


def on_cpu(layer):
    """Return a layer as a function, and inputs without gradients."""
    call, weights = module_of(layer)
    return call, [torch.randn(2, 12, 8), *(weight.detach() for weight in weights)]


def gated(x, z, weight, kernel):
    """Return a function of parts that inference has on a GPU: a convolution, a SiLU, a norm."""
    y = F.silu(F.conv1d(F.pad(x.mT, (2, 0)), kernel, groups=kernel.shape[0])).mT
    return textbook(y, z, weight)


def gated_inputs(needs=False):
    shapes = (2, 5, 6), (2, 5, 6), (6,), (6, 1, 3)
    return [torch.randn(shape).requires_grad_(needs) for shape in shapes]


def compiled_names(fn, *args, **options):
    """Compile a function as a user does it; compare with eager, and return the rewrites that run."""
    torch._dynamo.reset()
    compiled = refold.compile(fn, **{"accept": "always", "strict": True, "cache": False, **options})
    with torch.no_grad():
        torch.testing.assert_close(compiled(*args), fn(*args))
    (graph,) = compiled.report.graphs
    return [row.name for row in graph.applied], compiled


def test_inference_on_a_cpu_is_rewritten_after_autograd():
    call, args = on_cpu(Layer(widen=False))
    entry, _ = inferred(call, *args)
    assert names(entry) == []
    found, _ = compiled_names(call, *args)
    assert sorted(found) == [SKIP, SCAN, "unroll depthwise convolution"]


def test_inference_by_operators_is_checked_and_replayed(operators_pay, tmp_path):
    found, compiled = compiled_names(gated, *gated_inputs())
    assert found == [CONVOLUTION, NORM]
    (graph,) = compiled.report.graphs
    assert graph.mode == "inference"
    assert all(row.errors and all(error["passed"] for error in row.errors) for row in graph.applied)
    compiled.report.save(tmp_path / "plan.json")
    again, _ = compiled_names(gated, *gated_inputs(), plan=tmp_path / "plan.json")
    assert again == found


def test_chosen_passes_are_for_the_graph_after_autograd(operators_pay):
    name = "unroll depthwise convolutions"
    assert compiled_names(gated, *gated_inputs(), choose={"passes": [name]})[0] == ["unroll depthwise convolution"]
    assert compiled_names(gated, *gated_inputs(), choose={"passes": []})[0] == []


def test_graphs_without_a_convolution_are_not_traced_twice_in_inference(monkeypatch, operators_pay):
    monkeypatch.setattr(before_autograd, "_trace", lambda *_, **__: 1 / 0)
    entry, _ = inferred(lambda *args: Listing()(*args)[0], *inputs())
    assert not entry.rewrites
    assert not entry.notes


def detached_result(x, z, weight, kernel):
    return gated(x.detach(), z, weight, kernel).detach()


@pytest.mark.parametrize(("enabled", "fn"), [(True, detached_result), (True, gated), (False, gated)])
def test_what_may_have_gradients_stays(enabled, fn, operators_pay):
    """No result has a gradient, but a value in between may have one."""
    graphs = []

    @captures_loops
    def backend(gm, _):
        graphs.append(find_rewrites(gm, (), lambda _: True, [], training=False))
        return gm

    torch._dynamo.reset()
    with torch.set_grad_enabled(enabled):
        torch.compile(fn, backend=backend)(*gated_inputs(needs=True))
    assert [found is None for found in graphs] == [enabled]


def changed_before(x, z, weight, kernel):
    x.mul_(2)
    return gated(x, z, weight, kernel)


def changed_after(x, z, weight, kernel):
    y = gated(x, z, weight, kernel)
    x.zero_()
    z.add_(1)
    return y


def changed_between(x, z, weight, kernel):
    y = F.conv1d(F.pad(x.mT, (2, 0)), kernel, groups=kernel.shape[0])
    y.mul_(z.mT)
    return textbook(F.silu(y).mT, z, weight)


@pytest.mark.parametrize("fn", [changed_before, changed_after, changed_between])
def test_changes_in_place_in_inference(fn, operators_pay):
    """Before autograd what is changed stays; after it, changes are new values, and other passes may rewrite it."""
    args = gated_inputs()
    torch._dynamo.reset()
    compiled = refold.compile(fn, accept="always", strict=True, cache=False)
    mine, theirs = clone_inputs(args), clone_inputs(args)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*mine), fn(*theirs))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)
    assert not any("stays as it is" in note for note in compiled.report.graphs[0].notes)


@pytest.mark.exhaustive
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    keywords=st.sampled_from([{"stop": 9}, {"pad": 0, "input_pad": 2}, {"pad": 0, "input_pad": 1}, {"stop": 8}]),
    activation=st.sampled_from([F.silu, torch.sigmoid, lambda y: y]),
    norm=st.sampled_from([textbook, widened, narrowed_before_weight, grouped]),
    last=st.booleans(),
    read_twice=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1 << 20),
)
def test_random_gated_convolutions_in_inference(keywords, activation, norm, last, read_twice, dtype, seed):
    """Of any spelling the results are as near to float64 as eager's, in the same memory layout."""

    def layer(x, z, weight, taps, bias):
        def after(y):
            y = activation(y.mT if last else y)
            y = y if last else y.mT
            gate = F.pad(z, [0, 0, 0, y.shape[1] - z.shape[1]])
            out = norm(y, gate, weight)
            return (out, y) if read_twice else out

        return convolved(x, taps, bias, after, **keywords)

    torch.manual_seed(seed)
    shapes = (2, 9, 6), (2, 8, 6), (6,), (6, 1, 3), (6,)
    args = [torch.randn(shape).to(dtype) for shape in shapes]
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for module in (early_rewrites, replace_causal_convolutions, replace_gated_norms):
            patch.setattr(module, "has_pointwise_kernels", lambda device: True)
        _, error = inferred(layer, *args, results=found)
    assert error < 8
    leaves = torch.utils._pytree.tree_leaves
    assert [y.stride() for y in leaves(found[0])] == [y.stride() for y in leaves(layer(*args))]


@pytest.mark.exhaustive
@pytest.mark.parametrize("verify", ["off", "quick"])
def test_a_rewrite_that_makes_a_tensor_of_a_size_that_is_a_symbol(verify):
    def fn(x):
        decays = (0.2 * x.sigmoid() + 0.01).cumprod(1)
        return decays * (x / decays).cumsum(1)

    compiled = refold.compile(fn, dynamic=True, verify=verify, accept="always", strict=True, cache=False)
    for steps in (16, 20):
        x = torch.randn(2, steps, 3, generator=torch.Generator().manual_seed(steps), requires_grad=True)
        with no_code():
            y = compiled(x)
            (found,) = torch.autograd.grad(y.sum(), x)
        (expected,) = torch.autograd.grad(fn(x.double()).sum(), x)
        torch.testing.assert_close(y, fn(x))
        torch.testing.assert_close(found, expected)
    assert [row.name for row in compiled.report.rewrites] == ["replace rescaled sum"]
