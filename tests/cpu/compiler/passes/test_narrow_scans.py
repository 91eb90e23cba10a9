"""Scans that loops became, in the 16 bits that their inputs were widened from."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import refold
from refold.compiler.options import Options
from refold.compiler.recurrence import narrowing
from refold.compiler.validate.region import validate_region
from support.trained import trained
from support.trial import no_code

pytestmark = pytest.mark.rows(16)

NAME = "narrow scan"
STEPS = 16


def attention(q, k, v, g, D, z, *, decay="step", inside=False, scaled=(), after=()):
    """Compute linear attention by a loop that widens its inputs: state (b, h, n, p), g (b, t, h)."""
    half, (D, z) = v.dtype, (D.float(), z.float()) if v.dtype != torch.float64 else (D, z)
    q, k, v, g = (x if x.dtype == torch.float64 else x.float() for x in (q, k, v, g))
    q, k = (x * 0.3 if name in scaled else x for name, x in (("q", q), ("k", k)))
    g = -F.softplus(g)
    state, out = torch.zeros_like(k[:, 0, :, :, None] * v[:, 0, :, None]), []
    for t in range(q.shape[1]):
        if decay != "none":
            state = state * torch.exp(g[:, t, :, None, None] if decay == "step" else g[:, 0, :, None, None])
        state = state + k[:, t, :, :, None] * v[:, t, :, None]
        y = (q[:, t, :, :, None] * state).sum(-2)
        out.append(y.to(half) if inside else y)
    y = torch.stack(out, 1)
    y = y + D[:, None] * v if "skip" in after else y
    y = y * F.silu(z) if "gate" in after else y
    return y.to(half)


def mamba(x, dt, A, B, C, D, z, *, inside=False, after=(), **_):
    """Compute the scan of Mamba by a loop that widens its inputs: state (b, d, n)."""
    half = x.dtype
    x, dt, A, B, C, D, z = (v if v.dtype == torch.float64 else v.float() for v in (x, dt, A, B, C, D, z))
    dt = F.softplus(dt)
    h, out = torch.zeros_like(x[:, 0, :, None] * A), []
    for t in range(x.shape[1]):
        h = torch.exp(dt[:, t, :, None] * -A.exp()) * h + (dt[:, t] * x[:, t])[..., None] * B[:, t, None]
        y = (h * C[:, t, None]).sum(-1)
        out.append(y.to(half) if inside else y)
    y = torch.stack(out, 1)
    y = y + D * x if "skip" in after else y
    y = y * F.silu(z) if "gate" in after else y
    return y.to(half)


def average(x, a, *, inside=False, after=(), **_):
    """Compute a gated average by a loop that widens its inputs: state (b, d)."""
    half = x.dtype
    x, a = (v if v.dtype == torch.float64 else v.float() for v in (x, a))
    h, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = a[:, t] * h + x[:, t]
        out.append(h.to(half) if inside else h)
    y = torch.stack(out, 1)
    return (y * F.silu(a) if "gate" in after else y).to(half)


def mixed(x, a, *, decay="step", after=(), **_):
    """Compute the same with resets, where the state is not read."""
    half = x.dtype
    x, a = (v if v.dtype == torch.float64 else v.float() for v in (x, a))
    h, out, starts = torch.zeros_like(x[:, 0]), [], a > 0.7
    for t in range(x.shape[1]):
        h = torch.where(starts[:, t], x[:, t], (h if decay == "none" else a[:, t] * h) + x[:, t])
        out.append(h)
    y = torch.stack(out, 1)
    return (y * F.silu(a) if "gate" in after else y).to(half)


def drawn(kind, dtype):
    """Return a loop and its inputs."""
    torch.manual_seed(0)
    b, t, h, n, p = 2, STEPS, 2, 4, 3
    if kind is attention:
        shapes = [(b, t, h, n), (b, t, h, n), (b, t, h, p), (b, t, h), (h,), (b, t, h, p)]
    elif kind is mamba:
        shapes = [(b, t, p), (b, t, p), (p, n), (b, t, n), (b, t, n), (p,), (b, t, p)]
    else:
        shapes = [(b, t, p), (b, t, p)]
    inputs = [torch.randn(shape).to(dtype) for shape in shapes]
    return inputs if kind in (attention, mamba) else [inputs[0], inputs[1].sigmoid()]


@pytest.fixture(autouse=True)
def any_backend(monkeypatch):
    """Narrow what the CPU's own kernels take in float32 only, too."""
    monkeypatch.setattr(narrowing, "_backend", lambda name, args: None)


KINDS = [(attention, "ssd"), (mamba, "selective_scan"), (average, "linear_scan"), (mixed, "linear_scan")]


def operands(graph, operator):
    """Return the dtypes of the arguments x, B and C, or x, of the one operator of a graph."""
    (node,) = (n for n in graph.nodes if str(n.target).startswith(f"refold.{operator}"))
    places = [0, 3, 4] if operator != "linear_scan" else [1]
    return {(x.meta.get("val", x.meta.get("example_value"))).dtype for x in (node.args[i] for i in places)}


drawn_few = settings(max_examples=2, deadline=None, phases=[Phase.generate])
spellings = st.fixed_dictionaries(
    {
        "decay": st.sampled_from(["none", "head", "step"]),
        "inside": st.booleans(),
        "scaled": st.sets(st.sampled_from(["q", "k"])),
        "after": st.sets(st.sampled_from(["skip", "gate"])),
    }
)


def wide_keys(kind, how, dtype):
    """Tell whether an operand is more than a widened value: keys that are scaled, x divided by small log decays."""
    return kind is attention and ("k" in how["scaled"] or (how["decay"] != "none" and dtype == torch.float16))


@pytest.mark.parametrize(("kind", "operator"), KINDS)
@settings(drawn_few)
@given(how=spellings, dtype=st.sampled_from([torch.bfloat16, torch.float16]))
def test_training(kind, operator, how, dtype):
    graphs = []
    entry, error = trained(partial(kind, **how), *(x.requires_grad_() for x in drawn(kind, dtype)), graphs=graphs)
    stays = wide_keys(kind, how, dtype)
    assert (NAME in [row.name for row in entry.rewrites]) is not stays
    graphs[0].eliminate_dead_code()
    assert operands(graphs[0], operator) == {torch.float32 if stays else dtype}
    assert error < 2


@pytest.mark.parametrize(("kind", "operator"), KINDS)
@settings(drawn_few, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(how=spellings, dtype=st.sampled_from([torch.bfloat16, torch.float16]), bad=st.integers(-1, STEPS - 1))
def test_inference(rewritten, kind, operator, how, dtype, bad):
    torch._dynamo.reset()
    args = drawn(kind, dtype)
    if bad >= 0:
        args[0][0, bad] = torch.nan
    outcome = rewritten(partial(kind, **how), *args)
    assert (NAME in outcome.names) is not wide_keys(kind, how, dtype)
    (before,), (after,) = outcome.before, outcome.after
    finite = before.isfinite()
    assert after[finite].isfinite().all()
    assert not after[~finite].isfinite().any()
    exact = kind(*(x.double() for x in args), **how)[finite]
    assert after.dtype == dtype
    own, new = (float((y[finite].double() - exact).norm()) for y in (before, after))
    assert new < 4 * own


def test_a_planted_bug_is_refused(rewritten, monkeypatch):
    monkeypatch.setattr(narrowing, "_is_same", lambda node, source: True)
    how = {"decay": "none", "after": {"gate"}}
    args = drawn(attention, torch.bfloat16)
    outcome = rewritten(partial(attention, **how), *args)
    rewrite = outcome.rewrites[-1]
    assert rewrite.name == NAME
    found = {n.name: n.meta["val"] for n in rewrite.original.graph.find_nodes(op="placeholder")}
    made = [torch.randn(x.shape).to(x.dtype) for x in found.values()]
    assert "not equal" in validate_region(rewrite, made, Options(accept="always")).reason


def test_own_calls_stay_as_they_are_written(rewritten):
    def by_ssd(q, k, v, g):
        decay = -F.softplus(g.float())
        return refold.ops.ssd(v.float(), -decay, -torch.ones(2), k.float(), q.float())[0].to(v.dtype)

    def by_scan(q, k, v, g):
        a = torch.exp(-F.softplus(g.float()))[..., None, None]
        x = k.float()[..., None] * v.float()[..., None, :]
        return (q.float()[..., None] * refold.ops.linear_scan(a.expand_as(x), x)[0]).sum(-2).to(v.dtype)

    for fn in (by_ssd, by_scan):
        torch._dynamo.reset()
        outcome = rewritten(fn, *drawn(attention, torch.bfloat16)[:4])
        assert NAME not in outcome.names
        assert [target for target in outcome.targets if "refold.ssd" in target]


@pytest.mark.exhaustive
@pytest.mark.parametrize("training", [False, True])
def test_captured_loops_through_the_compiler(training):
    torch._dynamo.reset()
    args = [x.requires_grad_(training) for x in drawn(attention, torch.bfloat16)]
    compiled = refold.compile(partial(attention, decay="step"), accept="always", strict=True, cache=False)
    with no_code(), torch.set_grad_enabled(training):
        y = compiled(*args).detach()
    (entry,) = compiled.report.graphs
    assert [row.name for row in entry.applied] == ["roll up loop", NAME]
    exact = attention(*(x.detach().double() for x in args))
    assert float((y.double() - exact).norm() / exact.norm()) < 2**-7


def rounded_to_be_read(x, dt, A, B, C):
    """Compute the scan of Mamba as transformers does: 16-bit steps, and states that are rounded to be read."""
    half = x.dtype
    A, B, x = (v if v.dtype == torch.float64 else v.float() for v in (A, B, x))
    dt = F.softplus(dt)
    decay = torch.exp(-A.exp()[None, :, None, :] * dt[:, :, :, None])
    added = dt[:, :, :, None] * B[:, None] * x[:, :, :, None]
    h, out = torch.zeros_like(added[:, :, 0]), []
    for t in range(x.shape[2]):
        h = decay[:, :, t] * h + added[:, :, t]
        out.append(torch.matmul(h.to(half), C[:, t].unsqueeze(-1))[..., 0])
    return torch.stack(out, -1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_states_that_are_rounded_to_be_read_are_not_written(half):
    sizes = (2, 4, STEPS), (2, 4, STEPS), (4, 3), (2, STEPS, 3), (2, STEPS, 3)
    args = [torch.randn(size).to(half) for size in sizes]
    run = refold.compile(rounded_to_be_read, accept="always", strict=True, cache=False)
    with no_code(), torch.no_grad():
        got, eager = run(*args), rounded_to_be_read(*args)
        exact = rounded_to_be_read(*(x.double() for x in args))
    (graph,) = run.report.graphs
    assert any("one selective_scan" in row.detail for row in graph.applied)
    errors = [float((y.double() - exact).norm() / exact.norm()) for y in (got, eager)]
    assert got.dtype == half
    assert errors[0] <= 2 * errors[1]
