"""Gradient hooks and checkpoints in and around loops: found, or refused with a reason; gradients are eager's."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from refold.compiler.dynamo import captures_loops, notes
from refold.compiler.dynamo.as_written import run_as_written
from refold.compiler.ir.evaluate import values_at
from refold.compiler.ir.fx import registers_hook
from support.scans import Described

# Where a function is left in the middle, Dynamo asks a result for its gradient.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.rows(16),
]

B, T, D = 2, 20, 3
NEW = torch.__version__ >= (2, 13)  # before, a function that registers a hook stays as it is


def clamp(g):
    return g.clamp(-0.5, 0.5)


def scan(x, a, body=lambda h: h):
    h, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = body(a[:, t] * h + x[:, t])
        out.append(h)
    return torch.stack(out, 1)


def on_the_state(x, a):
    h, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = a[:, t] * h + x[:, t]
        h.register_hook(clamp)
        out.append(h)
    return torch.stack(out, 1)


def hooked(h):
    h.register_hook(clamp)
    return h


def in_a_function_of_a_step(x, a):
    return scan(x, a, hooked)


def by_its_name(x, a):
    def body(h):
        getattr(h, "register_hook")(clamp)  # noqa: B009
        return h

    return scan(x, a, body)


def on_an_input_in_a_step(x, a):
    def body(h):
        a.register_hook(lambda g: 1.1 * g)
        return h

    return scan(x, a, body)


def before(x, a):
    z = x * 2
    z.register_hook(clamp)
    return scan(z, a)


def on_an_input(x, a):
    x.register_hook(lambda g: 3 * g)
    return scan(x, a)


def after(x, a):
    y = scan(x, a)
    y.register_hook(lambda g: 3 * g)
    return y * 2


def after_gradients_accumulate(x, a):
    x.register_post_accumulate_grad_hook(lambda p: None)
    return scan(x, a)


def retained(x, a):
    z = x * 2
    z.retain_grad()
    return scan(z, a)


def compiled(fn, inputs, entry, *more):
    """Return the gradients of a function whose loops became scans, and nothing else happened."""

    @captures_loops
    def backend(gm, _):
        return entry.describe(gm, *notes()).forward

    torch._dynamo.reset()
    return gradients(torch.compile(fn, backend=backend), inputs, *more)


def gradients(fn, inputs, *more):
    own = [x.detach().clone().requires_grad_() for x in inputs]
    for x in more:
        x.grad = None
    fn(*own).square().sum().backward()  # a reentrant checkpoint knows no other way
    return [x.grad for x in (*own, *more)]


def inputs():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(B, T, D, generator=generator), torch.rand(B, T, D, generator=generator)


@pytest.mark.parametrize("fn", [on_the_state, in_a_function_of_a_step, by_its_name, on_an_input_in_a_step])
def test_a_loop_that_registers_hooks_stays(fn):
    entry = Described("training")
    torch.testing.assert_close(compiled(fn, inputs(), entry), gradients(fn, inputs()))
    reasons = ["hook"] if torch.__version__ >= (2, 13) else ["hook", "higher-order"]  # of an autograd function
    assert any(f"[{reason}]" in note for note in entry.notes for reason in reasons)
    assert not entry.rewrites


@pytest.mark.parametrize("fn", [before, on_an_input, after, after_gradients_accumulate, retained])
def test_hooks_around_a_loop(fn):
    entry = Described("training")
    torch.testing.assert_close(compiled(fn, inputs(), entry), gradients(fn, inputs()))
    said = " ".join(entry.notes)
    assert "not-traced" not in said
    if NEW or fn not in (before, after, on_an_input):
        assert [row.name for row in entry.rewrites] == ["roll up loop"]
    else:
        assert "[hook]" in said


@pytest.mark.skipif(not NEW, reason="a graph holds no hooks before torch 2.13")
def test_a_value_behind_a_hook_is_had_without_gradients():
    graphs = []

    def backend(gm, _):
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    x, a = inputs()
    torch.compile(before, backend=backend)(x.clone().requires_grad_(), a)
    hook = next(filter(registers_hook, graphs[0].graph.nodes))
    given = {"L_x_": x, "L_a_": a}
    values = [given[str(node.target)] for node in graphs[0].graph.find_nodes(op="placeholder")]
    torch.testing.assert_close(values_at(graphs[0].graph, [hook.name], values)[hook.name], 2 * x)


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.value = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        h, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            z = self.gate(x[:, t]).sigmoid()
            h = (1 - z) * h + z * self.value(x[:, t])
            out.append(h)
        return torch.stack(out, 1)


class Nonlinear(Cell):
    def forward(self, x):
        h, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = torch.tanh(self.gate(h) + x[:, t])
            out.append(h)
        return torch.stack(out, 1)


def one_by_one(cells, reentrant):
    def run(x):
        for cell in cells:
            x = checkpoint(cell, x, use_reentrant=reentrant)
        return x

    return run


CHECKPOINTS = {
    "new": lambda cells: one_by_one(cells, False),
    "reentrant": lambda cells: one_by_one(cells, True),
    "sequential": lambda cells: lambda x: checkpoint_sequential(cells, 3, x, use_reentrant=False),
    "nested": lambda cells: lambda x: checkpoint(one_by_one(cells, False), x, use_reentrant=False),
    "closure": lambda cells: lambda x: checkpoint(lambda: cells[0](2 * x), use_reentrant=False),
}


@pytest.mark.parametrize("how", CHECKPOINTS)
def test_a_loop_in_a_checkpoint_is_a_scan(how):
    torch.manual_seed(0)
    cells, (x, _) = nn.ModuleList([Cell(), Cell(), Cell()]), inputs()
    fn, parameters, entry = CHECKPOINTS[how](cells), list(cells[0].parameters()), Described("training")
    torch.testing.assert_close(compiled(fn, [x], entry, *parameters), gradients(fn, [x], *parameters))
    assert [row.name for row in entry.rewrites if row.name == "roll up loop"], entry.notes


def test_a_sequence_of_the_caller_is_not_read_in_a_checkpoint():
    (x, a), entry = inputs(), Described("training")

    def fn(x, a):
        items = list(x.unbind(1))

        def inner(a):
            h = torch.zeros_like(items[0])
            for t, u in enumerate(items):
                h = a[:, t] * h + u
            return h

        return checkpoint(inner, a, use_reentrant=False)

    torch.testing.assert_close(compiled(fn, (x, a), entry), gradients(fn, (x, a)))


# Graphs that run eagerly ------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointed", [False, True])
def test_an_eager_graph_takes_no_more_calls_than_the_code(checkpointed):
    """Counts what reaches PyTorch's dispatcher, forward and backward."""
    cell, (x, _), graphs = Nonlinear(), inputs(), []
    fn = one_by_one([cell], False) if checkpointed else cell

    @captures_loops
    def backend(gm, _):
        graphs.append(run_as_written(gm))
        return graphs[0].forward

    torch._dynamo.reset()
    run = torch.compile(fn, backend=backend)
    parameters = list(cell.gate.parameters())
    torch.testing.assert_close(gradients(run, [x], *parameters), gradients(fn, [x], *parameters))
    assert "loop_over_time" in str([name for name, _ in graphs[0].named_modules()])

    def calls(f):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            gradients(f, [x], *parameters)
        return sum(event.count for event in profile.key_averages() if event.key.startswith("aten::"))

    assert calls(run) <= calls(fn)


def test_items_that_the_code_changes_in_place_are_read_as_they_are():
    def fn(x, a):
        h, x = torch.zeros_like(x[:, 0]), x * 1
        for t in range(x.shape[1]):
            h = torch.tanh(h) * a[:, t] + x[:, t]
            x[:, t] = h
        return x

    @captures_loops
    def backend(gm, _):
        return run_as_written(gm).forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(fn, backend=backend)(*inputs()), fn(*inputs()))
