"""Public recurrences, as written, are found in inference and training, and agree with eager in float64."""

import pytest
import torch
import torch.nn.functional as F

import refold
from refold.bench.recurrences import HEAD, RECURRENCES
from refold.compiler.decisions import Store
from refold.compiler.dynamo import associative_scan
from refold.compiler.options import Options
from refold.compiler.recurrence import systems
from refold.compiler.recurrence.systems import BOUNDED_SCAN
from refold.compiler.session import GraphCompile
from refold.report import GraphReport
from support.agreement import check

pytestmark = pytest.mark.rows(16)

STEPS = 21
TIES = (0.5, 1.0), (0.5, 1.0)  # as PyTorch's maximum and minimum share a gradient


@pytest.mark.rows(16)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", RECURRENCES)
def test_found_and_right(name, training):
    one = RECURRENCES[name]
    if training and not one.gradient:
        pytest.skip("eager cannot differentiate it")
    details = check(one.fn, one.inputs(2, STEPS, 2 * HEAD), training)
    assert any(one.found in detail for detail in details), details


def test_powers_of_two(monkeypatch):
    """With step sizes, in training: where decays were only positive, the states were written."""
    monkeypatch.setattr(torch, "exp", torch.exp2)
    test_found_and_right("selective", True)


def network(a, x, move=lambda x: x):
    """A tree in place, over views, as Mamba code without kernels has it."""
    a, x = move(a.clone()), move(x.clone())
    levels = x.shape[2].bit_length() - 1
    for k in range(levels):
        left, right = slice(2**k - 1, None, 2 ** (k + 1)), slice(2 ** (k + 1) - 1, None, 2 ** (k + 1))
        x[:, :, right] += a[:, :, right] * x[:, :, left]
        a[:, :, right] *= a[:, :, left].clone()
    for k in reversed(range(levels - 1)):
        left, right = slice(2 ** (k + 1) - 1, -(2**k), 2 ** (k + 1)), slice(3 * 2**k - 1, None, 2 ** (k + 1))
        x[:, :, right] += a[:, :, right] * x[:, :, left]
        a[:, :, right] *= a[:, :, left].clone()
    return move(x)


def doubled(a, x):
    """By doubling with padding."""
    k = 1
    while k < x.shape[1]:
        x = x + a * torch.nn.functional.pad(x, (0, 0, k, 0))[:, :-k]
        a = a * torch.nn.functional.pad(a, (0, 0, k, 0), value=1.0)[:, :-k]
        k *= 2
    return x


def backwards(a, x):
    from torch._higher_order_ops.associative_scan import associative_scan

    def combine(left, right):
        return {"a": left["a"] * right["a"], "x": left["x"].mul(right["a"]).add(right["x"])}

    return associative_scan(combine, {"a": a, "x": x}, 1, reverse=True, combine_mode="generic")["x"]


def with_logarithms(a, x):
    from torch._higher_order_ops.associative_scan import associative_scan

    def combine(left, right):
        return left[0] + right[0], torch.exp(right[0]) * left[1] + right[1]

    return associative_scan(combine, (a.log(), x), -2, combine_mode="generic")[1]


def operation(a, x):
    """The higher-order operation itself, as on a GPU, read whole and at its end."""

    def combine(a1, x1, a2, x2):
        return [a1 * a2, a2 * x1 + x2]

    operands = [a.movedim(1, 0), x.movedim(1, 0)]
    h = torch.ops.higher_order.associative_scan(combine, operands, ())[1].movedim(0, 1)
    return h * h[:, -1:]


def decays(steps=32):
    generator = torch.Generator().manual_seed(0)
    return torch.rand(2, steps, 6, generator=generator) * 0.5 + 0.5, torch.randn(2, steps, 6, generator=generator)


@pytest.mark.parametrize(("fn", "training"), [(backwards, True), (with_logarithms, False)])
def test_networks(fn, training):
    (detail,) = check(fn, decays(17), training)
    assert detail.startswith("17 steps of a state of 2 x 6 as one linear_scan")


def read_at_the_end_of_a_tree(a, x):
    from torch._higher_order_ops.associative_scan import associative_scan

    def combine(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    return associative_scan(combine, (a, x), 1, combine_mode="generic")[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", [(1, 17, 1), (1, 17, 6), (1, 20, 6), (2, 16, 1)], ids=str)
def test_networks_with_axes_of_one_element(sizes):
    """A batch of one: what is joined next to time has no axis that says so."""
    a, x = decays(sizes[1])
    (detail,) = check(read_at_the_end_of_a_tree, [y[: sizes[0], :, : sizes[2]] for y in (a, x)], False)
    assert detail == f"{sizes[1]} steps of a state of {sizes[0]} x {sizes[2]} as one linear_scan"


@pytest.mark.exhaustive
@pytest.mark.parametrize("training", [True, False])
def test_complex_networks(training):
    def fn(a, x):
        from torch._higher_order_ops.associative_scan import associative_scan

        def combine(left, right):
            return left[0] * right[0], right[0] * left[1] + right[1]

        decays = torch.polar(a, a).expand(x.shape)
        return associative_scan(combine, (decays, x.to(decays.dtype)), 1, combine_mode="generic")[1].real

    a, x = decays(17)
    assert check(fn, [a[0, 0], x], training) == ["17 steps of a state of 2 x 6 as one complex scan"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("within", [True, False], ids=["within the network", "around it"])
def test_networks_without_gradients_stay(within):
    """A scan in their place would have gradients."""

    def combine(left, right):
        return left[0] * right[0], right[0].detach() * left[1] + right[1]

    def fn(a, x):
        from torch._higher_order_ops.associative_scan import associative_scan

        if within:
            return a * x + associative_scan(combine, (a, x), 1, combine_mode="generic")[1]
        with torch.no_grad():
            h = doubled(a, x)
        return h + a * x

    assert check(fn, decays(17), True) == []


def test_inductor_compiles_the_operation_if_nothing_replaces_it(monkeypatch):
    """As on a GPU, where Inductor has code for it."""
    monkeypatch.setattr(associative_scan, "has_code", lambda device: True)
    built, scans = [], lambda gm: [node for node in gm.graph.nodes if associative_scan.is_scan(node)]

    def backend(gm, inputs):
        settings = Options(verify="off", accept="always", cache=False)
        session = GraphCompile(gm, inputs, settings, GraphReport(index=0, mode="inference"), Store(None, ""))
        assert scans(session.given)
        assert not scans(session.gm)
        session.built = lambda: built.append(session.gm)
        session.run()
        return gm

    torch._dynamo.reset()
    torch.compile(operation, backend=backend, fullgraph=True)(*decays())
    assert [len(scans(gm)) for gm in built] == [0, 1]


def test_what_replaces_the_operation_is_not_compiled_away(monkeypatch):
    """The program that runs is the one whose rewrites the report shows, also where Inductor has code of its own."""
    monkeypatch.setattr(associative_scan, "has_code", lambda device: True)
    built, compile_once = [], GraphCompile.built

    def counted(session):
        built.append(any(map(associative_scan.is_scan, session.gm.graph.nodes)))
        return compile_once(session)

    monkeypatch.setattr(GraphCompile, "built", counted)
    compiled = refold.compile(operation, accept="always", verify="off", cache=False, strict=True)
    torch.testing.assert_close(compiled(*decays()), doubled(*decays()) * doubled(*decays())[:, -1:])
    assert [row.detail for row in compiled.report.rewrites] == ["32 steps of a state of 2 x 6 as one linear_scan"]
    assert built == [False]


@pytest.mark.exhaustive
def test_a_network_in_place():
    def fn(a, x):
        return network(a[..., None], x[..., None], lambda x: x.transpose(1, 2))[..., 0]

    assert check(fn, decays(), False) == ["32 steps of a state of 2 x 6 x 1 as one linear_scan"]


@pytest.mark.parametrize("wrong", ["order", "decay", "shift", "sum"])
def test_networks_that_compute_something_else_stay(wrong):
    def fn(a, x):
        k = 1
        while k < x.shape[1]:
            left, decay = x[:, :-k], a[:, :-k] if wrong == "order" else a[:, k:]
            if wrong == "shift" and k == 4:
                left = torch.cat([left[:, 1:], left[:, :1]], 1)
            if wrong == "sum" and k == 2:
                decay = decay - 1
            x = torch.cat([x[:, :k], x[:, k:] + decay * left], 1)
            a = torch.cat([a[:, :k], a[:, k:] * (1 if wrong == "decay" and k == 2 else a[:, :-k])], 1)
            k *= 2
        return x

    assert check(fn, decays(), False) == []


def test_gradients_of_the_operation_are_those_of_its_definition():
    """PyTorch's own gradient takes results for independent of one another, and gives decays none."""

    def definition(a, x):
        h = doubled(a, x)
        return h * h[:, -1:]

    assert check(operation, decays(), True, definition) == ["32 steps of a state of 2 x 6 as one linear_scan"]


def test_states_that_are_contracted_later_are_not_written_in_training():
    def fn(a, x, c):
        h, hs = torch.zeros(*x[:, 0].shape, 4), []
        for t in range(x.shape[1]):
            h = a[:, t, :, None] * h + x[:, t, :, None] * c[:, t, None]
            hs.append(h)
        return torch.einsum("btdn,btn->btd", torch.stack(hs, 1), c)

    a, x = decays()
    details = check(fn, [a, x, torch.randn(2, 32, 4)], True)
    assert any("selective_scan" in detail for detail in details), details


COUPLED = {
    "rotation": lambda u, v, a, x: (a[0] * u - a[1] * v + x, a[1] * u + a[0] * v),
    "changes over time": lambda u, v, a, x: (x.tanh() * u + a[0] * v, a[1] * u + x),
    "gated": lambda u, v, a, x: (torch.where(x > 0, u + v, x - 0.5 * v + u), a[0] * u + 0.5 * v),
    "views": lambda u, v, a, x: ((a[0] * v.unsqueeze(0)).squeeze(0) + x, torch.lerp(u, v, 0.3)),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", COUPLED)
def test_coupled_carries(name, training):
    def fn(x, a):
        u, v, out = torch.zeros_like(x[:, 0]), x[:, 0], []
        for t in range(x.shape[1]):
            u, v = COUPLED[name](u, v, a, x[:, t])
            out.append(u * 2 + v)
        return torch.stack(out, 1)

    (detail,) = check(fn, [decays()[1], torch.tensor([0.6, -0.5])], training)
    assert "linear_system of 2" in detail


@pytest.mark.parametrize("numba", [True, False])
def test_five_coupled_carries_are_swept_and_never_composed(numba, monkeypatch):
    def fn(x):
        a = b = c = d = e = torch.zeros_like(x[:, 0])
        out = []
        for t in range(x.shape[1]):
            a, b, c, d, e = x[:, t] + 0.1 * (a + b + c + d + e), a, b, c, d
            out.append(a)
        return torch.stack(out, 1)

    if not numba:
        monkeypatch.setattr(systems, "_sweeps", lambda x: None)
    assert any("linear_system of 5" in detail for detail in check(fn, [decays()[1]], False)) == numba


def rwkv4_in_one_state(k, v, w, u):
    """Numerator, denominator and maximum are rows of one tensor."""
    w, state, out = -torch.exp(w), torch.stack([0 * w, 0 * w, 0 * w - 1e30]).expand(len(k), 3, -1), []
    for t in range(k.shape[1]):
        num, den, top = state[:, 0], state[:, 1], state[:, 2]
        new = torch.maximum(top, u + k[:, t])
        old, own = torch.exp(top - new), torch.exp(u + k[:, t] - new)
        out.append((old * num + own * v[:, t]) / (old * den + own))
        new = torch.maximum(top + w, k[:, t])
        old, own = torch.exp(top + w - new), torch.exp(k[:, t] - new)
        state = torch.stack([old * num + own * v[:, t], old * den + own, new], 1)
    return torch.stack(out, 1)


def retention_by_heads(q, k, v):
    """Heads in a loop in each step, each with a norm, which leave a list of states and one of results."""
    states, out = [x.new_zeros(len(x), HEAD, HEAD) for x in (q, k)], []
    for t in range(q.shape[1]):
        heads, after = [], []
        for i, state in enumerate(states):
            own = slice(i * HEAD, (i + 1) * HEAD)
            after.append((1 - 2.0 ** (-5 - i)) * state + k[:, t, own].unsqueeze(-1) * v[:, t, own].unsqueeze(-2))
            heads.append((q[:, t, own].unsqueeze(1) @ after[i]).squeeze(1))
        states = after
        out.append(F.group_norm(torch.cat(heads, -1), 2))
    return torch.stack(out, 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("fn", "name", "found"),
    [(rwkv4_in_one_state, "rwkv4", "running maximum"), (retention_by_heads, "xpos-retention", "ssd")],
)
def test_other_spellings(fn, name, found, training):
    (detail,) = check(fn, RECURRENCES[name].inputs(2, STEPS, 2 * HEAD), training)
    assert found in detail


def delays_in_any_order(x):
    """A recurrence of order 4, whose earlier values are handed on from the oldest to the newest."""
    y4 = y3 = y2 = y1 = torch.zeros_like(x[:, 0])
    out = []
    for t in range(x.shape[1]):
        y4, y3, y2, y1 = y3, y2, y1, x[:, t] + 0.5 * y1 - 0.3 * y2 + 0.2 * y3 + 0.1 * y4
        out.append(y1 + y4)
    return torch.cat([torch.stack(out, 1), y4[:, None]], 1)


@pytest.mark.parametrize("training", [True, False])
def test_what_only_keeps_an_earlier_value_is_not_computed(training, monkeypatch):
    seen, whole = [], systems.with_copies

    def watched(A, b, copies):
        seen.append((len(A), list(copies)))
        return whole(A, b, copies)

    monkeypatch.setattr(systems, "_sweeps", lambda x: None)
    monkeypatch.setattr(systems, "with_copies", watched)
    details = check(delays_in_any_order, [torch.randn(2, STEPS, 8)], training)
    assert details == [f"{STEPS} steps of a state of 2 x 8 as one linear_system of 4"]
    assert (1, [0, 1, 2]) in seen


@pytest.mark.codegen
def test_a_real_compile_checks_them():
    one = RECURRENCES["biquad"]
    compiled = refold.compile(one.fn, accept="always", strict=True)
    inputs = [x.requires_grad_() for x in one.inputs(2, 20, 3)]
    compiled(*inputs).sum().backward()
    (graph,) = compiled.report.graphs
    assert graph.chosen == "refold"
    assert graph.rewrites[0].status == "applied"


@pytest.mark.parametrize("steps", [1, 2, 7, 20])
def test_a_maximum_hands_no_gradient_to_what_it_does_not_take(steps):
    """Not even one that is not a number: garbage at the end must not reach what a later maximum cut off."""
    generator = torch.Generator().manual_seed(steps)
    shift, floor = (torch.randn(steps, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    leaves = [x.requires_grad_() for x in (shift, floor, floor[0].detach().clone())]
    weights = torch.randn(steps, 6, generator=generator, dtype=torch.float64)
    weights[-1, :3] = float("nan")

    def loop(shift, floor, h):
        out = []
        for t in range(steps):
            h = torch.maximum(h + shift[t], floor[t])
            out.append(h)
        return torch.stack(out)

    expected = torch.autograd.grad(loop(*leaves), leaves, weights)
    got = torch.autograd.grad(BOUNDED_SCAN(None, *leaves[:2], None, leaves[2], False, *TIES), leaves, weights)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("training", [True, False])
def test_a_derivative_that_the_code_takes_itself(training):
    """An operator brings its own gradient, which is none that a graph can take; and wrapped tensors have no storage."""

    def loss(a, x):
        return sum(y.sin().sum() for y in (doubled(a, x),))

    check(lambda a, x: torch.func.grad(loss)(a, x), decays(17), training)


@pytest.mark.parametrize(
    ("log_decay", "operator"),
    [(lambda g: g, "linear_scan"), (lambda g: 1e-6 * g, "linear_scan"), (lambda g: F.logsigmoid(g) / 16, "ssd")],
    ids=["zeros", "small", "logsigmoid"],
)
def test_gradients_of_small_log_decays_keep_their_digits(log_decay, operator):
    """``ssd`` gets inputs divided by log decays; where these are small, gradients are differences of large numbers."""

    def fn(q, k, v, g):
        g, state, out = log_decay(g).exp(), q.new_zeros(q.shape[0], q.shape[2], 4, 3), []
        for t in range(q.shape[1]):
            state = g[:, t, :, None, None] * state + k[:, t, :, :, None] * v[:, t, :, None, :]
            out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
        return torch.stack(out, 1)

    generator = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(2, 20, 2, *n, generator=generator) for n in ((4,), (4,), (3,), ()))
    details = check(fn, [q, k, v, g * (g < 0)], training=True)
    assert any(operator in detail for detail in details), details
