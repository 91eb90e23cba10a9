"""A tiny language model (Mamba-2 by broadcast, multiply and sum) trains as it does eagerly."""

import pytest
import torch
from torch._higher_order_ops import associative_scan, cond, scan, while_loop
from torch._higher_order_ops import map as map_over
from torch.utils.checkpoint import checkpoint

from refold.compiler.backend import refold
from refold.compiler.dynamo import captures_loops
from refold.compiler.dynamo.before_autograd import BeforeAutograd
from refold.compiler.engine import compile as refold_compile
from refold.compiler.ir.captured_loop import parts
from refold.compiler.options import Options
from refold.compiler.validate import program
from refold.compiler.validate.region import validate_region
from refold.errors import RefoldWarning
from refold.report import Report
from support.scans import Described
from support.tiny_lm import losses

pytestmark = pytest.mark.rows(16)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("checkpointed", "autocast"), [(False, None), (True, torch.bfloat16), (False, torch.bfloat16)])
def test_loss_curves_without_code_generation(checkpointed, autocast):
    """`test_loss_curve` is checkpointed in float32."""
    entry = Described("training")

    @captures_loops
    def backend(gm, _):
        return entry.describe(gm)

    own = losses(None, checkpointed=checkpointed, autocast=autocast)
    got = losses(backend, checkpointed=checkpointed, autocast=autocast)
    found = [row.name for row in entry.rewrites]
    assert found.count("fuse chunked scan") == 2
    assert found.count("unroll depthwise convolution") == 2
    assert own[-20:].mean() < own[:20].mean() - 1  # it learns something
    if autocast is None:
        assert (got - own).abs().max() < 1e-4
    else:  # 16 bits part ways: what counts is how far they are from float32
        exact = losses(None)
        assert (got - exact).abs().mean() < 4 * (own - exact).abs().mean()


@pytest.mark.exhaustive
def test_loss_curve():
    report = Report()

    def backend(gm, inputs):
        options = {"verify": "off", "accept": "always", "strict": True, "cache": False, "report": report}
        return refold(gm, inputs, options=options)

    sizes = (1, 16, 8, 8, 8)
    got, own = losses(captures_loops(backend), checkpointed=True, sizes=sizes), losses(None, sizes=sizes)
    assert "fuse chunked scan" in [row.name for row in report.graphs[0].applied]
    assert (got - own).abs().max() < 1e-4


@pytest.fixture
def autocast_of_a_gpu():
    """Sum 16-bit numbers as autocast does on a GPU: in float32, by an argument of the sum."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def in_float32(x, *args, dtype=None, **kwargs):
        with torch._C._ExcludeDispatchKeyGuard(keys):
            dtype = torch.float32 if dtype is None and x.dtype == torch.bfloat16 else dtype
            return torch.ops.aten.sum.dim_IntList(x, *args, dtype=dtype, **kwargs)

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("sum.dim_IntList", in_float32, "AutocastCPU")
        yield


@pytest.mark.exhaustive
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_scan_under_autocast_is_right_by_its_check(device, request):
    if device == "gpu":
        request.getfixturevalue("autocast_of_a_gpu")
    found = []

    def backend(gm, inputs):
        for path in parts(gm):
            found.extend(BeforeAutograd(gm.get_submodule(".".join(path))).rewrites)
        return gm

    losses(captures_loops(backend), checkpointed=True, autocast=torch.bfloat16, sizes=(1, 32, 32, 32, 16), steps=1)
    [scan] = [rewrite for rewrite in found if rewrite.name == "fuse chunked scan"]
    assert scan.detail.endswith("in bfloat16")
    assert validate_region(scan, None, Options(verify="quick", accept="always")).reason == ""


def test_a_compiled_function_is_checkpointed():
    def layer(x):
        return torch.tanh(x.cumsum(0) * 2)

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=refold, options={"verify": "off", "accept": "always", "cache": False})
    x = torch.randn(20, 6, requires_grad=True)
    # It compiles in the checkpointed call, so hooks of saved tensors are active then.
    (got,) = torch.autograd.grad(checkpoint(compiled, x, use_reentrant=False).sum(), x)
    (want,) = torch.autograd.grad(layer(x).sum(), x)
    torch.testing.assert_close(got, want)


def test_a_transform_in_a_compiled_function():
    """Transforms of torch.func refuse hooks of saved tensors, so a compile adds none where there are none."""

    def gradient(x):
        return torch.func.grad(lambda y: torch.tanh(y.cumsum(0) * 2).sum())(x)

    torch._dynamo.reset()
    options = {"verify": "off", "accept": "always", "cache": False, "strict": True}
    compiled = torch.compile(gradient, backend=refold, options=options)
    x = torch.randn(20, 6)
    torch.testing.assert_close(compiled(x), gradient(x))


def averages(x, a):
    """Return all averages, and the last one."""
    a, h, results = torch.sigmoid(a), torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = a * h + (1 - a) * x[:, t]
        results.append(h)
    return torch.stack(results, 1), h


def leaves():
    torch.manual_seed(0)
    return torch.randn(2, 16, 3, requires_grad=True), torch.randn(3, requires_grad=True)


def compiled_averages():
    torch._dynamo.reset()
    return refold_compile(averages, accept="always", verify="off", strict=True, cache=False)


def backwards(fn, x, a):
    """Use the results of a layer in many ways, and return all gradients."""
    found, weights = [], [x, a]
    found += torch.autograd.grad(fn(x, a)[0].square().sum(), weights)  # some of the results
    found += torch.autograd.grad(fn(x, a)[1].square().sum(), weights)
    found += torch.autograd.grad(fn(x, a)[0][:, ::2].mT[..., -1].square().sum(), weights)  # a view
    found += torch.autograd.grad(fn(x, a)[0].mul_(2).square().sum(), weights)
    (first, _), (second, last) = fn(x, a), fn(0.5 * x, a)  # two calls, then their backwards
    found += torch.autograd.grad(second.square().sum() + last.sum(), weights)
    found += torch.autograd.grad(first.square().sum(), weights)
    found += torch.autograd.grad(fn(fn(x, a)[0], a)[0].square().sum(), weights)
    for reentrant in (False, True):
        checkpointed = checkpoint(fn, 1.0 * x, a, use_reentrant=reentrant)[0]
        checkpointed.square().sum().backward()
        found += [x.grad, a.grad]
        x.grad = a.grad = None
    hooks = [x.register_hook(lambda g: 2 * g), a.register_hook(lambda g: 3 * g)]
    found += torch.autograd.grad(fn(x, a)[0].square().sum(), weights)
    for hook in hooks:
        hook.remove()
    with torch.no_grad():
        fn(x, a)
        a += 0.1
    found += torch.autograd.grad(fn(x, a)[0].square().sum(), weights)
    found += torch.autograd.grad(fn(x, a.detach())[0].square().sum(), [x])
    return found


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo asks for it
def test_the_results_of_a_loop_are_used_in_many_ways():
    compiled = compiled_averages()
    wide = [v.detach().double().requires_grad_() for v in leaves()]
    for got, exact in zip(backwards(compiled, *leaves()), backwards(averages, *wide), strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)
    assert all(graph.chosen == "refold" for graph in compiled.report.graphs)


def test_a_second_backward_is_refused_with_a_remedy():
    """PyTorch computes a backward in the memory of what was saved, unless it is told not to."""
    import torch._functorch.config as config

    x, a = leaves()
    loss = compiled_averages()(x, a)[0].square().sum()
    with pytest.raises(RuntimeError, match="donated_buffer=False"):
        loss.backward(retain_graph=True)
    with config.patch(donated_buffer=False):
        compiled = compiled_averages()
        loss, own = (fn(x, a)[0].square().sum() for fn in (compiled, averages))
        expected = torch.autograd.grad(own, [x, a])
        for again in (True, True, False):
            got = torch.autograd.grad(loss, [x, a], retain_graph=again)
            torch.testing.assert_close(got, expected)
        (gradient,) = torch.autograd.grad(compiled(x, a)[0].square().sum(), [x], create_graph=True)
        with pytest.raises(RuntimeError, match="does not currently support double backward"):
            gradient.sum().backward()


def repeated(x, a, w):
    """A ``while`` of PyTorch, whose backward has as many steps as a run takes."""
    start = (torch.zeros((), dtype=torch.int64), x)
    return while_loop(lambda i, h: i < 4, lambda i, h: (i + 1, torch.tanh(h @ w) * a), start)[1]


def repeated_plainly(x, a, w):
    for _ in range(4):
        x = torch.tanh(x @ w) * a
    return x


def stepped(x, a, w):
    """A scan of PyTorch that is none of refold's."""

    def step(h, xt):
        h = torch.tanh(h @ w + xt)
        return h.clone(), h.sin()

    return scan(step, 1.0 * a[:1], x[:, None])[1][:, 0]


def stepped_plainly(x, a, w):
    h, results = a[:1], []
    for xt in x[:, None]:
        h = torch.tanh(h @ w + xt)
        results.append(h.sin())
    return torch.cat(results)


def chosen(x, a, w):
    y = map_over(lambda xt, w: torch.tanh(xt @ w), x, w)
    return cond(x.sum() > 100, lambda y, a: y - a, lambda y, a: y * a, (y, a))


def chosen_plainly(x, a, w):
    return torch.tanh(x @ w) * a


def combined(x, a, w):
    def neighbours(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    return associative_scan(neighbours, (a, x), 0, combine_mode="generic")[1] @ w


def combined_plainly(x, a, w):
    h, results = torch.zeros(5), []
    for xt, at in zip(x, a, strict=True):
        h = at * h + xt
        results.append(h)
    return torch.stack(results) @ w


@pytest.mark.parametrize(
    ("fn", "plain"),
    [
        (repeated, repeated_plainly),
        (stepped, stepped_plainly),
        (chosen, chosen_plainly),
        (combined, combined_plainly),
    ],
)
def test_operations_that_take_functions(fn, plain):
    torch.manual_seed(0)
    torch._dynamo.reset()
    args = [v.requires_grad_() for v in (torch.randn(6, 5), torch.rand(6, 5), 0.3 * torch.randn(5, 5))]
    compiled = refold_compile(fn, accept="always", strict=True, cache=False, fullgraph=True)
    got, own = compiled(*args), plain(*args)
    torch.testing.assert_close(got, own)
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), args) for y in (got, own)), strict=True):
        torch.testing.assert_close(a, b)


def test_backwards_run_in_the_thread_that_compiles(monkeypatch):
    # On a GPU a backward has a thread of its own, and Inductor would wait there for the lock of the compile under way.
    apart, grad = [], torch.autograd.grad

    def recorded(*args, **kwargs):
        apart.append(torch._C._is_multithreading_enabled())
        return grad(*args, **kwargs)

    def layer(x, decay):
        h = torch.zeros_like(x[0])
        states = []
        for t in range(x.shape[0]):
            h = decay * h + x[t]
            states.append(h)
        return torch.stack(states)

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=refold, options={"accept": "always", "cache": False, "strict": True})
    x, decay = torch.randn(40, 6, requires_grad=True), torch.rand(6, requires_grad=True)
    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd, "grad", recorded)
        y = compiled(x, decay)
    assert apart
    assert not any(apart)
    assert torch._C._is_multithreading_enabled()
    for got, want in zip(grad(y.sum(), [x, decay]), grad(layer(x, decay).sum(), [x, decay]), strict=True):
        torch.testing.assert_close(got, want)


def test_a_backward_that_inductor_cannot_compile_is_noticed_at_once(monkeypatch):
    import torch._inductor.compile_fx as inductor

    def fails(*args, **kwargs):
        raise RuntimeError("planted")

    def layer(x):
        return (torch.tanh(x.cumsum(0)) * x[:, None].expand(-1, 7, -1).sum(1)).cumsum(1)

    report = Report()
    torch._dynamo.reset()
    options = {"verify": "off", "accept": "always", "cache": False, "report": report}
    compiled = torch.compile(layer, backend=refold, options=options)
    x = torch.randn(20, 6, requires_grad=True)
    with monkeypatch.context() as patch:
        patch.setattr(inductor, "compile_fx_backward", fails)
        with pytest.warns(RefoldWarning, match="planted"):
            y = compiled(x)
    assert "runs eagerly" in report.graphs[0].notes[-1]
    (got,) = torch.autograd.grad(y.sum(), x)
    (want,) = torch.autograd.grad(layer(x).sum(), x)
    torch.testing.assert_close(got, want)


def without_code_for_sums(monkeypatch):
    """Let Inductor fail as that of torch 2.11 does for some cumulative sums on a GPU."""
    from torch._inductor import lowering

    def fails(*args, **kwargs):
        raise TypeError("list indices must be integers or slices, not NoneType")

    monkeypatch.setitem(lowering.lowerings, torch.ops.aten.cumsum.default, fails)


@pytest.mark.exhaustive
@pytest.mark.codegen
def test_sums_that_inductor_has_no_code_for_are_left_to_aten(monkeypatch):
    """In the graph that is rewritten, and, where that is not right, in the original; with their backwards."""
    without_code_for_sums(monkeypatch)
    monkeypatch.setattr(program, "compared", lambda *given: (given[-1], "differs from the original: planted"))

    def layer(x, w):
        return (torch.tanh(x.cumsum(0) * 3.25)[:, :, None] * w).sum(1).cumsum(1, dtype=torch.float64)

    torch._dynamo.reset()
    compiled = refold_compile(layer, accept="always", cache=False, strict=True)
    x, w = torch.randn(20, 6, requires_grad=True), torch.randn(6, 5, requires_grad=True)
    got, want = compiled(x, w), layer(x, w)
    (graph,) = compiled.report.graphs
    assert graph.chosen == "inductor"
    assert graph.external_scans
    assert [row.name for row in graph.rewrites][:1] == ["recover contraction"]
    (note,) = [note for note in graph.notes if "handed to ATen" in note]
    assert "list indices must be integers" in note
    for one, other in zip(*(torch.autograd.grad(y.sum(), [x, w]) for y in (got, want)), strict=True):
        torch.testing.assert_close(one, other)


def test_a_graph_that_inductor_cannot_compile_runs_eagerly(monkeypatch):
    """Also where the rewritten graph was compiled, and is wrong."""
    monkeypatch.setattr(program, "compared", lambda *given: (given[-1], "differs from the original: planted"))
    monkeypatch.setattr(program, "inductor", lambda *_, **__: [][0])

    def layer(x, w):
        return (x[:, :, None] * w).sum(1) * 3.5

    torch._dynamo.reset()
    compiled = refold_compile(layer, accept="always", cache=False)
    x, w = torch.randn(20, 6), torch.randn(6, 5)
    with pytest.warns(RefoldWarning, match="it runs eagerly"):
        y = compiled(x, w)
    (graph,) = compiled.report.graphs
    assert graph.chosen == "eager"
    assert graph.reason == "because Inductor failed: IndexError: list index out of range"
    torch.testing.assert_close(y, layer(x, w))
