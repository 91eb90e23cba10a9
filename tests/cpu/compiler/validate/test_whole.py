"""The check of the whole graph catches what the checks of regions miss, and accepts right programs."""

import functools
import operator

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.fx import Graph, GraphModule, symbolic_trace

import refold
from refold.compiler import pipeline, record
from refold.compiler.dynamo import rewriting_before_autograd
from refold.compiler.dynamo.sequential import SequentialLoop
from refold.compiler.ir import dispatch
from refold.compiler.ir.dispatch import Impossible, Random, Recording, in_dtype
from refold.compiler.private import TorchDispatchMode, tree_leaves
from refold.compiler.refusals import REASONS
from refold.compiler.validate import whole
from refold.compiler.validate.region import Judgement
from refold.compiler.validate.whole import compare
from refold.verify.memory import peak_bytes

ALWAYS = {"accept": "always", "strict": True}
aten = torch.ops.aten


def scores(x, y):
    return (x[:, :, None] * y[:, None]).sum(-1)


def pair(dtype=torch.float32, grad=False):
    return tuple(torch.randn(2, n, 16, dtype=dtype).requires_grad_(grad) for n in (9, 8))


@pytest.fixture
def planted(monkeypatch):
    """Return a function: let all regions pass, and make the n-th product of matrices wrong by a thousandth."""

    def plant(n):
        def wrong(graph, *args, **kwargs):
            rewrites = honest(graph, *args, **kwargs)
            products = [node for node in graph.nodes if node.target is aten.bmm.default]
            if rewrites:
                with graph.inserting_after(products[n]):
                    new = graph.call_function(aten.mul.Tensor, (products[n], 1.001))
                new.meta = dict(products[n].meta)
                products[n].replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
            return rewrites

        rewriting_before_autograd()  # which takes the honest one as it is imported
        honest = pipeline.run
        monkeypatch.setattr(pipeline, "run", wrong)
        monkeypatch.setattr(record, "validate_region", lambda *args: Judgement())

    return plant


def test_a_wrong_output_is_caught(planted):
    planted(0)
    x, y = pair()
    compiled = refold.compile(scores, **ALWAYS)
    assert torch.allclose(compiled(x, y), scores(x, y), rtol=1e-5, atol=1e-5)
    (graph,) = compiled.report.graphs
    assert graph.chosen == "inductor"
    assert "differs from the original: output 0: relative error 1.0e-03" in graph.reason
    (row,) = graph.rewrites
    assert row.status == "refused"
    assert f"[graph-differs]: {REASONS['graph-differs'][1]}" in row.reason


@pytest.mark.parametrize("n", [1, 2])
def test_a_wrong_gradient_is_caught(planted, n):
    planted(n)
    x, y = pair(grad=True)
    compiled = refold.compile(scores, **ALWAYS)
    expected = torch.autograd.grad(scores(x, y).square().sum(), [x, y])
    got = torch.autograd.grad(compiled(x, y).square().sum(), [x, y])
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(got, expected, strict=True))
    (graph,) = compiled.report.graphs
    assert graph.chosen == "inductor"
    assert "gradient of input" in graph.reason
    assert "output" not in graph.reason.partition("original:")[2]


def test_a_wrong_update_of_a_buffer_is_caught(planted):
    planted(0)

    class Stateful(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("state", torch.zeros(2, 9, 8))

        def forward(self, x, y):
            self.state.add_(scores(x, y))
            return x + 1

    x, y = pair()
    layer = Stateful()
    compiled = refold.compile(layer, **ALWAYS)
    with torch.no_grad():
        compiled(x, y)
    assert torch.allclose(layer.state, scores(x, y), rtol=1e-5, atol=1e-5)
    (graph,) = compiled.report.graphs
    assert graph.chosen == "inductor"
    assert "differs from the original: input" in graph.reason


def test_verify_off_checks_nothing(planted):
    planted(0)
    x, y = pair()
    compiled = refold.compile(scores, verify="off", **ALWAYS)
    assert not torch.allclose(compiled(x, y), scores(x, y), rtol=1e-5)
    assert compiled.report.graphs[0].checks == compiled.report.rewrites[0].errors == ()


@pytest.mark.rows(2)
@pytest.mark.parametrize("training", [False, True])
def test_dropout_draws_the_same_numbers_in_all_runs(training):
    def fn(x, y):
        return nn.functional.dropout(scores(x, y), 0.5) * torch.rand(2, 9, 8)

    compiled = refold.compile(fn, **ALWAYS)
    state = torch.random.get_rng_state()
    compiled(*pair(grad=training))
    (graph,) = compiled.report.graphs
    assert graph.chosen == "refold"
    assert graph.checked_against == "float64"
    assert len(graph.checks) == (3 if training else 1)
    assert max(check["error"] for check in graph.checks) < 1e-6
    assert not torch.equal(state, torch.random.get_rng_state())


@pytest.mark.exhaustive
def test_a_checkpoint_with_dropout():
    """Inductor draws other numbers than eager when a checkpoint recomputes; that is no mistake of a rewrite."""
    layer = nn.Linear(16, 16)

    def inner(x, y):
        return scores(nn.functional.dropout(layer(x), 0.1), y).tanh()

    compiled = refold.compile(
        lambda x, y: torch.utils.checkpoint.checkpoint(inner, x, y, use_reentrant=False), **ALWAYS
    )
    compiled(*pair())
    (graph,) = compiled.report.graphs
    assert graph.chosen == "refold", graph.reason
    assert any(check["kind"] == "output 0" for check in graph.checks)


@pytest.mark.rows(2)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("accept", ["always", "faster"])
def test_an_input_with_a_gradient_that_changes_in_place(accept):
    def fn(x, y):
        return scores(x.mul_(2), y)

    x, y = pair(grad=True)
    compiled = refold.compile(fn, accept=accept, strict=True)
    expected = torch.autograd.grad(fn(x * 1, y).sum(), [x, y])
    got = torch.autograd.grad(compiled(x * 1, y).sum(), [x, y])
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(got, expected, strict=True))


def test_a_program_that_fails_is_not_used():
    def broken(x):
        raise RuntimeError("planted\nmore")

    x = torch.randn(3)
    assert compare(broken, torch.sin, torch.sin, [x], 1).reason == "the program: it fails: planted"


def test_dropout_hides_no_mistake(planted):
    planted(0)
    compiled = refold.compile(lambda x, y: nn.functional.dropout(scores(x, y), 0.5), **ALWAYS)
    compiled(*pair())
    assert "output 0: relative error 1.0e-03" in compiled.report.graphs[0].reason


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_checked(dtype):
    compiled = refold.compile(scores, **ALWAYS)
    compiled(*pair(dtype, grad=True))
    (graph,) = compiled.report.graphs
    assert graph.chosen == "refold", graph.reason
    assert graph.checked_against == "float64"
    assert len(graph.checks) == 3
    assert all(check["bound"] < (1e-12 if dtype == torch.float64 else 0.1) for check in graph.checks)


def test_integers_and_complex_results_are_compared():
    def original(x):
        return (x > 0).sum(), torch.complex(x, x), x.argmax()

    x = torch.randn(50)
    assert not compare(original, original, original, [x], 1, None).reason
    wrong = [
        (lambda x: (original(x)[0] + 1, *original(x)[1:]), "output 0: 1 of 1 elements differ"),
        (lambda x: (original(x)[0], original(x)[1].conj(), original(x)[2]), "output 1: relative error"),
        (lambda x: (*original(x)[:2], original(x)[2].int()), "output 2: its output has dtype torch.int32"),
        (lambda x: original(x)[:2], "output 2: not all programs have it"),
    ]
    for program, reason in wrong:
        assert reason in compare(program, original, original, [x], 1, None).reason


def test_a_sum_that_cancels_may_round():
    """One number is one draw of its rounding: its bound is what roundings of the inputs move it by."""

    def original(x, w):
        return (x * w).sum()

    def other(x, w):
        return (x * w).flip(0).cumsum(0)[-1]

    x = torch.randn(4000)
    w = torch.cat([torch.ones(2000), -torch.ones(2000)])
    x = torch.cat([x[:2000], x[:2000] + 1e-4 * torch.randn(2000)])
    assert not compare(other, original, original, [x, w], 1, None).reason
    assert compare(lambda x, w: original(x, w) * 1.5, original, original, [x, w], 1, None).reason


def test_a_small_channel_is_judged_alone():
    """Next to channels of 1, what is wrong in one of 1e-6 is lost in norms of the whole."""

    def original(x):
        return (x.exp() - 1.0) * size

    size = torch.tensor([1.0, 1e-6, 1.0, 1.0])
    x = torch.randn(200, 4)
    assert not compare(lambda x: x.exp() * size - size, original, original, [x], 1).reason
    wrong = compare(lambda x: original(x) * torch.tensor([1.0, 1.01, 1.0, 1.0]), original, original, [x], 1)
    assert "small next to others" in wrong.reason


def test_what_cannot_be_run_in_float64_is_its_own_reference():
    def original(x):
        return x.view(torch.int32).bitwise_and(-2).view(torch.float32) * 3

    x = torch.randn(200)
    found = compare(original, original, original, [x], 1, None)
    assert (found.against, found.reason) == ("the original", "")
    assert "bits of a tensor" in found.note
    assert compare(lambda x: original(x) * 1.001, original, original, [x], 1, None).reason


# Running a program in another dtype --------------------------------------------------------------


@pytest.mark.slow
def test_large_products_are_not_written_out(monkeypatch):
    monkeypatch.setattr(dispatch, "BLOCK", 1000)
    a, b = (torch.randn(1000, 40, dtype=torch.float64).requires_grad_() for _ in range(2))

    def run():
        y = (a[:, None] * b[None]).sum(-1).tanh().mean()
        return [y, *torch.autograd.grad(y, [a, b])]

    peak = peak_bytes(lambda: in_dtype(run, torch.float64), torch.device("cpu"))
    assert peak < 1000 * 1000 * 40 * 8 / 3
    wide = [x.detach().double().requires_grad_() for x in (a, b)]
    y = (wide[0][:, None] * wide[1][None]).sum(-1).tanh().mean()
    for got, expected in zip(in_dtype(run, torch.float64), [y, *torch.autograd.grad(y, wide)], strict=True):
        assert got.dtype == torch.float64
        assert torch.allclose(got, expected, rtol=1e-12)


@pytest.mark.parametrize(
    "use",
    [
        lambda p: p.sin().sum(-1),
        lambda p: p.reshape(-1, 2).sum(-1),
        lambda p: p.add_(1).sum(-1),
        lambda p: (p.view(-1).add_(1), p.sum(-1))[1],
        lambda p: p.as_strided((30,), (3,)).sum(),
        lambda p: p[3:].mean((0, 2)) + p.amax(),
        lambda p: torch.cat([p, p]).prod(-1),
    ],
)
def test_products_that_are_used_otherwise_are_right(monkeypatch, use):
    monkeypatch.setattr(dispatch, "BLOCK", 10)
    a, b = torch.randn(6, 1, 4), torch.randn(1, 5, 4)
    expected = use(a.double() * b.double())
    assert torch.allclose(in_dtype(lambda: use(a * b), torch.float64), expected, rtol=1e-12)


def test_a_factor_that_changes_afterwards(monkeypatch):
    monkeypatch.setattr(dispatch, "BLOCK", 10)

    def run(a, b):
        p = a * b
        a.zero_()
        return p.sum(-1)

    a, b = torch.randn(6, 1, 4, dtype=torch.float64), torch.randn(1, 5, 4, dtype=torch.float64)
    expected = run(a.clone(), b)
    assert torch.equal(in_dtype(lambda: run(a.clone(), b), torch.float64), expected)


def test_draws_are_replayed():
    def run(x):
        y = nn.functional.dropout(x, 0.25) + torch.randn(7) + torch.empty(7).uniform_(2, 3)
        return torch.native_dropout(y, 0.5, True)[0]

    x = torch.randn(7)
    with Recording() as recording:
        narrow = run(x)
    assert torch.allclose(in_dtype(lambda: run(x.double()), torch.float64, recording.draws).float(), narrow, rtol=1e-5)
    with pytest.raises(Random):
        in_dtype(lambda: run(x.double()), torch.float64)


def test_randomness_inside_other_operations_is_refused():
    q = torch.randn(1, 1, 4, 4)
    attention = nn.functional.scaled_dot_product_attention
    assert in_dtype(lambda: attention(q, q, q), torch.float64).dtype == torch.float64
    with pytest.raises(Impossible, match="random"):
        in_dtype(lambda: torch.nn.functional.rrelu(q, training=True), torch.float64)


def test_what_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setattr(dispatch, "BLOCK", 10)
    monkeypatch.setattr(dispatch, "available_bytes", lambda device: 100)
    with pytest.raises(Impossible, match="does not fit in memory"):
        in_dtype(lambda: torch.ones(20, 1) + torch.ones(20), torch.float64)


def test_a_product_is_written_out_once_for_all_steps_of_a_loop(monkeypatch):
    monkeypatch.setattr(dispatch, "BLOCK", 10)
    a, b = torch.randn(20, 3), torch.randn(20, 1)

    def run():
        product = a * b
        return [product[t] for t in range(20)]

    steps = in_dtype(run, torch.float64)
    assert len({step.untyped_storage().data_ptr() for step in steps}) == 1
    assert torch.equal(torch.stack(steps), a.double() * b.double())


def test_an_original_that_neither_fits_nor_compiles_is_run_in_blocks(monkeypatch):
    """Else it would be judged as if it were exact."""
    monkeypatch.setattr(dispatch, "BLOCK", 10)

    def original(x, y):
        return (x[:, None] * y).sum(-1) + 256.0 - 256.0

    x, y = (torch.randn(n, 16, dtype=torch.bfloat16, requires_grad=True) for n in (9, 8))
    assert compare(original, original, None, [x, y], 16).reason == ""
    assert "output 0" in compare(lambda x, y: 2.5 * original(x, y), original, None, [x, y], 16).reason


def test_results_of_few_elements_under_autocast():
    """What autocast rounds float32 inputs to is what a draw of the original's rounding comes from."""

    def linear(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            return (x @ w).float()

    graphs = []
    x, w = torch.randn(4, 64), torch.randn(64, 2)
    torch._dynamo.reset()
    torch.compile(linear, backend=lambda gm, _: graphs.append(gm) or gm, fullgraph=True)(x, w)
    y, exact = linear(x, w), (x.double() @ w.double()).float()

    def lucky(a, b):
        near = torch.allclose(a, x, rtol=1e-6, atol=0) and torch.allclose(b, w, rtol=1e-6, atol=0)
        return (exact if near else linear(a, b),)

    assert compare(lambda *_: (y,), graphs[0], lucky, [x, w], 64).reason == ""
    assert compare(lambda *_: (1.25 * y,), graphs[0], lucky, [x, w], 64).reason
    assert compare(lambda *_: (y,), lucky, lucky, [x, w], 64).reason


@pytest.mark.slow
@pytest.mark.parametrize(("out", "against"), [(torch.bfloat16, "float32"), (torch.float32, "the original")])
def test_what_does_not_fit_in_float64_is_compared_in_float32(monkeypatch, out, against):
    monkeypatch.setattr(dispatch, "BLOCK", 10)
    monkeypatch.setattr(dispatch, "available_bytes", lambda device: 2 * 400 * 6)
    inputs = [torch.randn(20, 1).bfloat16().requires_grad_(), torch.randn(20).bfloat16()]

    def run(x, y):
        return ((x + y).exp() / 3).to(out)

    assert compare(run, run, run, inputs, 1).against == against
    assert not compare(run, run, run, inputs, 1).reason
    wrong = compare(lambda x, y: (run(x, y) * 1.5).to(out), run, run, inputs, 1)
    assert "output 0" in wrong.reason


def test_cotangents_are_exact_in_every_dtype():
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        y = torch.empty(50, dtype=dtype)
        assert torch.equal(whole._cotangent(0, y).double(), whole._cotangent(0, y.double()))


def test_views_of_an_expanded_input():
    """In other strides than those of the input, its axes could not be merged."""

    def fn(x, a):
        rows = x.expand(3, 2, 6).view(6, 6)
        return (rows[:, None] * a).sum(-1)

    x = torch.randn(6, generator=torch.Generator().manual_seed(0)).expand(3, 1, 6)
    a = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    compiled = refold.compile(fn, accept="always", strict=True, cache=False)
    torch.testing.assert_close(compiled(x, a), fn(x, a))
    assert [row.status for row in compiled.report.graphs[0].rewrites] == ["applied"]


class Counted(TorchDispatchMode):
    """Counts the elements of all tensors that are computed."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.elements += 0 if func.is_view else sum(x.numel() for x in tree_leaves(result) if isinstance(x, Tensor))
        return result


def reads_rows(x, a):
    h, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = a[:, t] * h + x[:, -1 - t] * x[:, t : t + 1].squeeze(1) + x[:, 0]
        out.append(h)
    return torch.stack(out, 1) + 2 * x + a.flip(1)


def step_by_step():
    """The loop of `reads_rows` as its region has it, functions of the same inputs."""
    graph = Graph()
    k, h, x, a = map(graph.placeholder, "khxa")

    def read(of, at, width=None):
        if width is None:
            return graph.call_function(aten.select.int, (of, 1, at))
        row = graph.call_function(aten.slice.Tensor, (of, 1, at, graph.call_function(operator.add, (at, 1))))
        row.meta["val"] = torch.empty(2, 1, 3)
        return graph.call_function(aten.squeeze.dim, (row, 1))

    back = graph.call_function(operator.sub, (-1, k))
    new = graph.call_function(aten.mul.Tensor, (read(a, k), h))
    for term in (graph.call_function(aten.mul.Tensor, (read(x, back), read(x, k, 1))), read(x, 0)):
        new = graph.call_function(aten.add.Tensor, (new, term))
    graph.output((new, new))
    return graph


def first(x, a):
    return torch.zeros_like(x[:, 0]), x, a


@pytest.mark.parametrize("how", ["mode", "region"])
def test_a_check_takes_as_long_as_the_steps(how):
    """A gradient of one step's read is as long as all steps: written out, a check takes the square of their number."""
    elements = []
    for steps in (32, 64):
        x, a = (torch.randn(2, steps, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
        if how == "mode":

            def run(x=x, a=a):
                y = reads_rows(x, a)
                return [y.detach(), *(g.detach() for g in torch.autograd.grad(y, (x, a), torch.ones_like(y)))]

            exact, measured = run(), lambda run=run: in_dtype(run, torch.float64)
        else:
            loop = SequentialLoop(symbolic_trace(first), GraphModule({}, step_by_step()), steps, 1, [0, 1], 1)

            def run(call, x=x, a=a):
                y = call(x, a)
                return [*y, *torch.autograd.grad(sum(map(torch.sum, y)), (x, a))]

            exact, measured = run(loop), lambda run=run, loop=loop: run(functools.partial(loop.in_dtype, None))
        with Counted() as counted:
            found = measured()
        assert all(map(torch.equal, found, exact))
        elements.append(counted.elements)
    assert elements[1] < 2.5 * elements[0]


def test_sums_of_parts_are_written_out_where_they_are_read():
    """Gradients of parts of one tensor are used in all the ways that autograd has."""
    x = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)

    def run():
        seen = []
        y = x * 1.5
        y.register_hook(lambda g: seen.append(g.clone()) or g * 2)
        z = y[0, 1] + y[1, -2] * y[:, 2:4].sum((0, 1)) + y[:, ::2].sum((0, 1)) + y[..., -1:].sum() + y[2, :0].sum()
        z = z + y.sum((0, 1)) + y[:, 0].sum(0)
        return [
            z.detach(),
            *torch.autograd.grad(z.sum() + x[1].exp().sum(), x),
            *torch.autograd.grad(x[1].sum(), x),
            *seen,
        ]

    assert all(torch.allclose(a, b, rtol=1e-13) for a, b in zip(in_dtype(run, torch.float64), run(), strict=True))
