"""One compile for all lengths if Dynamo knows the length as a symbol, else one per length; results are right."""

import pytest
import torch

import refold
from refold.compiler.dynamo import captures_loops, notes
from refold.compiler.dynamo.capture.lengths import KEEPS_SYMBOLS
from refold.compiler.ir.captured_loop import CapturedLoop

pytestmark = pytest.mark.rows(16)

symbolic = pytest.mark.skipif(not KEEPS_SYMBOLS, reason="needs torch 2.13: before, each length is compiled anew")
LENGTHS = (24, 40, 33, 17, 16, 3, 1)


def xs(steps, grad=False, width=8):
    return torch.randn(2, steps, width, generator=torch.Generator().manual_seed(steps)).requires_grad_(grad)


def stacked(x):
    h, ys = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = 0.5 * h + x[:, t]
        ys.append(h)
    return torch.stack(ys, 1)


def writes(x):
    h, o = torch.zeros(x.shape[0], 8, 8), torch.zeros_like(x)
    for t in range(x.shape[1]):
        h = 0.5 * h + x[:, t, :, None] * x[:, t, None].cos()
        o[:, t] = (x[:, t, :, None].sin() * h).sum(-2)
    return o


def read_before(x):
    h, ys = torch.zeros(x.shape[0], 8, 8), []
    for t in range(x.shape[1]):
        ys.append((x[:, t, :, None].sin() * h).sum(-2))
        h = x[:, t, None, :1].sigmoid() * h + x[:, t, :, None] * x[:, t, None].cos()
    return torch.stack(ys, 1)


def reversed_range(x):
    h, o = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
    for t in reversed(range(x.shape[1])):
        h = 0.5 * h + x[:, t]
        o[:, t] = h
    return o, h


def last_only(x):
    h, n = torch.zeros_like(x[:, 0]), 0
    for t in range(x.shape[1]):
        h = 0.5 * h + x[:, t]
        n += 2
    return h, n


def first_item_before(x):
    h, ys = x[:, 0], [x[:, 0]]
    for t in range(1, x.shape[1]):
        h = 0.5 * h + x[:, t] * x[:, t - 1]
        ys.append(h)
    return torch.stack(ys, 1)


def concatenated(x):
    h, ys = torch.zeros_like(x[:, :1]), [x[:, :1] * 0]
    for t in range(x.shape[1]):
        h = 0.5 * h + x[:, t : t + 1]
        ys.append(h)
    return torch.cat(ys, dim=1)


def prepared(x):
    decay = torch.exp(-torch.nn.functional.softplus(x)[..., None] * torch.arange(1, 5))
    inputs, h, ys = x[..., None] * x[:, :, None, :4], x.new_zeros(x.shape[0], 8, 4), []
    for t in range(x.shape[1]):
        h = decay[:, t] * h + inputs[:, t]
        ys.append((h * x[:, t, None, 4:]).sum(-1))
    return torch.stack(ys, 1)


def counted(x):
    h = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        h = 0.5 * h + x[:, t] * 0.9 ** (x.shape[1] - t)
    return h


def last_differs(x):
    h, ys = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = 0.5 * h + (x[:, t] if t < x.shape[1] - 1 else -x[:, t])
        ys.append(h)
    return torch.stack(ys, 1)


def unbound(x):
    h, ys = torch.zeros_like(x[:, 0]), []
    for xt in x.unbind(1):
        h = 0.5 * h + xt
        ys.append(h)
    return torch.stack(ys, 1)


ONE = (stacked, writes, reversed_range, last_only, first_item_before, concatenated, prepared)
EACH = (last_differs, unbound, counted)


def _sum(ys):
    total = 0
    for y in ys:
        total = total + y
    return total


def _ends_of(ys):
    first, *_, last = ys
    return first + last


def _swapped(ys):
    ys[0] = ys.pop()
    return torch.stack(ys, 1)


# What else a program does with a list that a loop has filled.
USES = {
    "for": _sum,
    "comprehension": lambda ys: torch.cat([y[:, None] for y in ys], 1),
    "starred": lambda ys: torch.stack([*ys, ys[0]], 1),
    "arguments": lambda ys: (lambda *zs: torch.stack(zs, 1))(*ys),
    "unpacked": _ends_of,
    "enumerate": lambda ys: torch.stack([y * i for i, y in enumerate(ys)], 1),
    "zip": lambda ys: torch.stack([a * b for a, b in zip(ys, reversed(ys), strict=True)], 1),
    "reversed": lambda ys: torch.stack(list(reversed(ys)), 1),
    "added to": lambda ys: torch.stack([ys[-1]] + ys, 1),  # noqa: RUF005
    "generator": lambda ys: torch.stack(list(y * 2 for y in ys), 1),  # noqa: C400
    "changed": _swapped,
    "truth": lambda ys: torch.stack(ys, 1) if ys else None,
    "dictionary": lambda ys: {"ys": ys, "count": len(ys)},
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_list_of_any_length_is_used_otherwise(use, counting):
    def fn(x):
        h, ys = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = 0.5 * h + x[:, t]
            ys.append(h)
        return use(ys)

    compiled = torch.compile(fn, backend=counting)
    for steps in (17, 24):
        same(compiled(xs(steps)), fn(xs(steps)))
    assert len(counting.graphs) > 1


def same(got, expected):
    assert type(got) is type(expected)
    for a, b in zip(*(torch.utils._pytree.tree_leaves(x) for x in (got, expected)), strict=True):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
            assert a.stride() == b.stride()
        else:
            assert a == b


@pytest.fixture
def counting():
    """Return a backend that runs graphs as they are, and how many steps each of their loops has: None for any."""
    graphs = []

    @captures_loops
    def backend(gm, _):
        graphs.append([m.count for m in gm.modules() if isinstance(m, CapturedLoop)])
        backend.notes += notes()
        return gm

    backend.graphs, backend.notes = graphs, []
    return backend


@symbolic
@pytest.mark.parametrize("fn", ONE)
def test_one_trace_for_all_lengths(fn, counting):
    compiled = torch.compile(fn, backend=counting)
    for steps in LENGTHS:
        same(compiled(xs(steps)), fn(xs(steps)))
    # The first length is a number; the second one makes Dynamo try a symbol; the captured loop has 16 steps or more.
    assert set(counting.graphs[1]) == {None}
    captured = [graph for graph in counting.graphs if graph]
    assert len(captured) == 2 if fn is not first_item_before else len(captured) <= 3


@pytest.mark.exhaustive
@pytest.mark.parametrize("fn", EACH if KEEPS_SYMBOLS else [*ONE, *EACH])
def test_else_each_length_is_traced_with_its_number(fn, counting):
    compiled = torch.compile(fn, backend=counting)
    for steps in LENGTHS[:5] if fn is counted else LENGTHS:
        same(compiled(xs(steps)), fn(xs(steps)))
    assert all(graph for graph in counting.graphs[:4])


def test_chunks_of_each_length_are_captured(counting):
    """Where a chunk ends depends on the length, and so does whether the last one is shorter."""

    def fn(x):
        h, ys, size = torch.zeros_like(x[:, 0]), [], 2
        for start in range(0, x.shape[1], size):
            end = min(start + size, x.shape[1])
            ys.append(x[:, start:end] + h[:, None])
            h = 0.5 * h + x[:, start : start + size].sum(1)
        return torch.cat(ys, 1)

    compiled = torch.compile(fn, backend=counting)
    for steps in (41, 50, 65):
        same(compiled(xs(steps)), fn(xs(steps)))
    assert [graph for graph in counting.graphs if graph] == [[20], [25], [32]]


@symbolic
def test_a_length_that_is_marked_is_a_symbol_from_the_first_call(counting):
    compiled = torch.compile(stacked, backend=counting)
    for steps in (24, 40):
        x = xs(steps)
        torch._dynamo.mark_dynamic(x, 1)
        same(compiled(x), stacked(x))
    assert counting.graphs == [[None]]


@symbolic
def test_all_sizes_may_be_symbols(counting):
    compiled = torch.compile(stacked, backend=counting, dynamic=True)
    for batch, steps, width in ((2, 24, 8), (3, 40, 5), (7, 16, 4)):
        x = torch.randn(batch, steps, width)
        same(compiled(x), stacked(x))
    assert counting.graphs == [[None]]


SCANS = [
    (stacked, None, True), (writes, None, False), (read_before, None, False), (last_only, None, False),
    (prepared, True, True),
]  # fmt: skip


@symbolic
@pytest.mark.parametrize(("fn", "dynamic", "grad"), SCANS)
def test_one_scan_for_all_lengths(fn, dynamic, grad):
    compiled = refold.compile(fn, accept="always", verify="off", strict=True, dynamic=dynamic, cache=False)
    for steps in (24, 40, 33, 16):
        x = xs(steps, grad)
        got, expected = compiled(x), fn(x)
        same(got, expected)
        if grad:
            roots = (y[0] if isinstance(y, tuple) else y for y in (got, expected))
            own, eager = (torch.autograd.grad(y.sin().sum(), x)[0] for y in roots)
            torch.testing.assert_close(own, eager, rtol=1e-3, atol=1e-4)
    graphs = compiled.report.graphs
    assert len(graphs) == (1 if dynamic else 2)
    assert graphs[-1].rewrites[0].detail.startswith("any number of steps")
    assert not graphs[-1].notes


def test_the_check_covers_symbolic_lengths():
    compiled = refold.compile(writes, accept="always", strict=True, cache=False)
    for steps in (24, 40, 33):
        same(compiled(xs(steps)), writes(xs(steps)))
    second = compiled.report.graphs[1]
    assert second.rewrites[0].errors
    assert second.checks


@pytest.mark.exhaustive
@symbolic
def test_what_needs_the_number_says_so():
    compiled = refold.compile(counted, accept="always", verify="off", strict=True, cache=False)
    for steps in (24, 40):
        same(compiled(xs(steps)), counted(xs(steps)))
    assert [len(graph.applied) for graph in compiled.report.graphs] == [1, 1]
    assert any("for these sizes alone" in note for note in compiled.report.graphs[1].notes)


def test_an_empty_batch_is_what_eager_gives():
    compiled = refold.compile(stacked, accept="always", verify="off", strict=True, cache=False)
    for batch in (2, 0, 3):
        x = torch.randn(batch, 24, 8, requires_grad=True)
        got, expected = compiled(x), stacked(x)
        same(got, expected)
        assert torch.autograd.grad(got.sum(), x)[0].shape == x.shape


@pytest.mark.exhaustive
def test_the_last_compile_is_said():
    compiled = refold.compile(unbound, accept="always", verify="off", strict=True, cache=False)
    with torch._dynamo.config.patch(recompile_limit=2):
        for steps in (24, 40):
            compiled(xs(steps))
    said = [any("the last of 2 compiles" in note for note in graph.notes) for graph in compiled.report.graphs]
    assert said == [False, True]


@pytest.mark.parametrize("dynamic", [True, None])
def test_numbers_that_change_between_calls(dynamic):
    """Dynamo makes them inputs of the graph, which a body reads."""

    def fn(x, scale):
        h = torch.zeros_like(x[0])
        for t in range(20):
            h = scale * h + x[t]
        return h

    torch._dynamo.reset()
    graphs = []

    @captures_loops
    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward

    x, compiled = torch.randn(20, 4), torch.compile(fn, backend=backend, dynamic=dynamic)
    for scale in (0.25, 0.5, 0.75):
        torch.testing.assert_close(compiled(x, scale), fn(x, scale))
    assert len(graphs) == (1 if dynamic else 2)
