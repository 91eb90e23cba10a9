"""Something is always said: of loops that stay, and of functions that Dynamo leaves to Python."""

import pytest
import torch
import torch.nn.functional as F

import refold
from refold.compiler.dynamo import captures_loops
from refold.compiler.inductor import show_graph
from refold.compiler.passes.reroll_loops import STAYS
from refold.compiler.pipeline import run
from refold.report import Report
from support.products import few

pytestmark = pytest.mark.rows(16)


def delta_chunks(q, k, v, beta, size=16):
    b, heads, length, d = q.shape
    q, k, v = (x.reshape(b, heads, length // size, size, d) for x in (q, k, v))
    beta = beta.reshape(b, heads, length // size, size, 1)
    state, out = q.new_zeros(b, heads, d, d), []
    for i in range(length // size):
        new = beta[:, :, i] * (v[:, :, i] - k[:, :, i] @ state)
        out.append(q[:, :, i] @ state + torch.tril(q[:, :, i] @ k[:, :, i].mT) @ new)
        state = state + k[:, :, i].mT @ new
    return torch.cat(out, 2)


def layers(x, *weights):
    out = []
    for w in weights:
        x = torch.tanh(x @ w) + x
        out.append(x)
    return torch.stack(out)


def passes_say(fn, *inputs):
    """Return the graph that the passes make of a function's ATen graph, and their notes."""
    found, notes = [], []

    def backend(gm, inputs):
        show_graph(gm, inputs, lambda graph: found.extend(run(graph, notes=notes)))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(fn, backend=backend)(*inputs)
    return found, notes


@few("chunks", [4, 6, 8, 12], [4])
def test_a_loop_over_chunks_that_stays(chunks):
    q, k, v = torch.randn(3, 1, 2, 16 * chunks, 4)
    found, notes = passes_say(delta_chunks, q, F.normalize(k, dim=-1), v, torch.rand(1, 2, 16 * chunks))
    assert "roll up loop" not in [rewrite.name for rewrite in found]
    said = " ".join(note for note in notes if note.startswith(STAYS))
    assert f"{__file__}:" in said
    assert "[" in said


def test_layers_are_no_loop_over_time():
    found, notes = passes_say(layers, torch.randn(3, 4), *torch.randn(12, 4, 4))
    assert not found
    assert not [note for note in notes if note.startswith(STAYS)]


def lightning(q, k, v, block=8):
    length, state, out = q.shape[1], q.new_zeros(q.shape[0], q.shape[2], v.shape[2]), []
    inside = torch.tril(torch.ones(block, block))
    for i in range((length + block - 1) // block):
        start, end = i * block, min(i * block + block, length)
        n = end - start
        qi, ki, vi = q[:, start:end], k[:, start:end], v[:, start:end]
        out.append(qi @ state + ((qi @ ki.mT) * inside[:n, :n]) @ vi)
        state = state * 0.9**n + ki.mT @ vi
    return torch.cat(out, 1)


@pytest.mark.parametrize("length", [48, 45, 41])
def test_a_shorter_last_block(length):
    inputs = [torch.randn(2, length, 4) for _ in range(3)]
    found, _ = passes_say(lightning, *inputs)
    assert "roll up loop" in [rewrite.name for rewrite in found]


def early_stop(x, a):
    h, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = a[:, t] * h + x[:, t]
        out.append(h)
        if h.abs().max() > 100:
            break
    return torch.stack(out, 1)


def placed(x, a):
    y, h = torch.zeros_like(x), torch.zeros_like(x[:, 0])
    order = torch.arange(x.shape[1]).flip(0)
    for t in range(x.shape[1]):
        h = a[:, t] * h + x[:, t]
        y[:, order[t]] = h
    return y


@pytest.mark.parametrize(("fn", "line"), [(early_stop, "if h.abs().max() > 100:"), (placed, "y[:, order[t]] = h")])
def test_a_function_that_dynamo_leaves_to_python(fn, line):
    report = Report()

    @captures_loops
    def backend(gm, inputs):
        return gm.forward

    backend.report = report
    torch._dynamo.reset()
    inputs = torch.randn(2, 20, 3), torch.rand(2, 20, 3)
    inputs[0][:, 12] = 200  # where `early_stop` ends
    torch.testing.assert_close(torch.compile(fn, backend=backend)(*inputs), fn(*inputs))
    assert not report.graphs
    assert f"`{fn.__name__}` is not compiled" in report.notes[-1]
    assert f"{__file__}:" in " ".join(report.notes)
    assert " ".join(report.notes).count(line) == 1  # also where the loop was refused for the same reason
    assert Report.from_dict(report.to_dict()).notes == report.notes


def test_explain_tells_it_too():
    torch._dynamo.reset()
    assert "`early_stop` is not compiled" in str(
        refold.explain(early_stop, torch.randn(2, 20, 3), torch.rand(2, 20, 3))
    )
