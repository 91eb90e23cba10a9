"""Rewrite a recurrence without generating code, and compare it with eager in float64."""

import torch

from refold.compiler.decisions import Store
from refold.compiler.dynamo import captures_loops
from refold.compiler.inductor import bind, show_graph
from refold.compiler.ir.evaluate import evaluate
from refold.compiler.options import Options
from refold.compiler.pipeline import run
from refold.compiler.session import GraphCompile
from refold.report import GraphReport


def rewritten(fn, *inputs, training=False):
    """Rewrite before autograd, and in inference after it, and run that without generating code: (results, rows)."""
    rows = []

    def backend(gm, example_inputs):
        entry = GraphReport(index=0, mode="training" if training else "inference")
        settings = Options(verify="off", accept="always", cache=False)
        session = GraphCompile(gm, example_inputs, settings, entry, Store(None, ""))
        session.rewrite_before_autograd()
        rows.extend(session.rows.values())
        if training:
            return session.gm
        graphs = []
        show_graph(session.gm, example_inputs, lambda graph: graphs.append((graph, run(graph))))
        ((graph, rewrites),) = graphs
        rows.extend(rewrites)
        return lambda *xs: evaluate(torch.fx.GraphModule(graph.owning_module, graph), bind(graph, xs))

    torch._dynamo.reset()
    return torch.compile(fn, backend=captures_loops(backend), fullgraph=True)(*inputs), rows


def outputs(fn, inputs, training, weights):
    inputs = [x.detach().requires_grad_(training) for x in inputs]
    y = fn(*inputs)
    own = torch.autograd.grad((y * weights.to(y)).sum(), inputs, materialize_grads=True) if training else ()
    return [y.detach(), *own]


def check(fn, inputs, training, like=None):
    """Compare with eager, or ``like``, in float64: as near to it as that is in float32, or nearly so."""
    found = []

    def run(*xs):
        y, rows = rewritten(fn, *xs, training=training)
        found.extend(rows)
        return y

    weights = torch.randn(fn(*inputs).shape, generator=torch.Generator().manual_seed(1))
    like = like or fn
    exact = outputs(like, [x.double() for x in inputs], training, weights)
    eager = outputs(like, inputs, training, weights)
    for r, o, y in zip(exact, eager, outputs(run, inputs, training, weights), strict=True):
        norm = float(r.norm()) or 1.0
        error, own = (float((x.double() - r).norm()) / norm for x in (y, o))
        assert error <= 16 * own + 1e-6, f"error {error:.1e}, eager's is {own:.1e}"
    return [row.detail for row in found]
