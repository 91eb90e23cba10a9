"""Harnesses: the pipeline on a function's ATen graph without generating code, and the capture of loops alone."""

import copy
from dataclasses import dataclass

import pytest
import torch

from cpu.compiler.beside_float64 import errors
from refold.compiler.dynamo import captures_loops, notes
from refold.compiler.inductor import bind, show_graph
from refold.compiler.ir.captured_loop import CapturedLoop
from refold.compiler.ir.evaluate import evaluate
from refold.compiler.ir.metadata import stale
from refold.compiler.ir.rewrite import Rewrite
from refold.compiler.pipeline import run
from support.scans import spliced


@pytest.fixture(autouse=True)
def _without_code(without_code):
    """What a graph becomes, and its values; tests marked ``codegen`` show that code is made of it, too."""


@dataclass
class Outcome:
    """What the pipeline did to one graph, and both graphs' outputs on the same inputs."""

    rewrites: list[Rewrite]
    before: list[torch.Tensor]
    after: list[torch.Tensor]
    targets: list[str]

    @property
    def names(self):
        return [rewrite.name for rewrite in self.rewrites]

    def worst(self):
        """Return the largest relative L2 difference between the outputs."""
        worst = 0.0
        for a, b in zip(self.before, self.after, strict=True):
            assert a.shape == b.shape
            assert a.dtype == b.dtype
            assert a.stride() == b.stride()
            norm = float(a.double().norm()) or 1.0
            worst = max(worst, float((a.double() - b.double()).norm()) / norm)
        return worst


def _tensors(out):
    return [x for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]


@pytest.fixture
def rewritten():
    """Return a function: (fn, *inputs, **compile options) -> Outcome for its one graph."""

    def go(fn, *inputs, dynamic=None, wanted=lambda site: True):
        found = []

        def backend(gm, example_inputs):
            graphs = []

            def rewrite(graph):
                twin = copy.deepcopy(graph)
                twin.owning_module = graph.owning_module
                graphs.extend([twin, graph, run(graph, wanted)])

            show_graph(gm, example_inputs, rewrite)
            original, graph, rewrites = graphs
            values = bind(original, example_inputs)
            assert values is not None
            before, after = (
                _tensors(evaluate(torch.fx.GraphModule(graph.owning_module, g), values)) for g in (original, graph)
            )
            assert not stale(graph)
            targets = [str(node.target) for node in graph.nodes if node.op == "call_function"]
            found.append(Outcome(rewrites, before, after, targets))
            return gm

        torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=True)(*inputs)
        (outcome,) = found
        return outcome

    return go


@pytest.fixture
def around_loops():
    """Return a function: (fn, inputs, mode) -> (what was found before autograd, the worst error beside float64).

    In training, the error is that of gradients, too.
    """

    def go(fn, given, mode="training"):
        run, seen = spliced(fn, mode)
        found = errors(run, fn, given, mode == "training")
        return seen, max(found)

    return go


@pytest.fixture
def captured():
    """Return a function: (fn, *inputs) -> (what the compiled function returns, steps of each loop that was captured).

    Its attribute ``notes`` says why long loops were not captured.
    """

    def go(fn, *inputs):
        steps, go.notes = [], []

        @captures_loops
        def backend(gm, _):
            steps.extend(m.count for m in gm.modules() if isinstance(m, CapturedLoop))
            go.notes.extend(notes())
            return gm

        torch._dynamo.reset()
        return torch.compile(fn, backend=backend)(*inputs), steps

    return go
