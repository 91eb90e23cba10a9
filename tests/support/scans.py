"""For tests of scans: compile, name what was found, and run an emitted scan by itself."""

import torch

import refold
from refold.compiler.dynamo import captures_loops
from refold.compiler.dynamo.body import differentiable
from refold.compiler.ir.builder import Builder
from refold.compiler.session import describe_captured
from refold.report import GraphReport


def flat(results):
    return [results] if isinstance(results, torch.Tensor) else list(results)


def compiled(fn, **options):
    torch._dynamo.reset()
    return refold.compile(fn, accept="always", strict=True, **options)


def spliced(fn, mode="inference"):
    """Return a function that runs the graph in which captured loops are replaced, as it is, and what was `Described`.

    Inductor, which takes most of the time of compiling, has no part in it.
    """
    seen = Described(mode)

    @captures_loops
    def backend(gm, _):
        return seen.describe(gm)

    torch._dynamo.reset()
    return torch.compile(fn, backend=backend, fullgraph=True), seen


class Described:
    """What was found in graphs: notes, rewrites and loops, as the report of one graph has them."""

    def __init__(self, mode="inference"):
        self.report = GraphReport(0, mode)

    def describe(self, gm, *notes):
        """Return a graph as it would be rewritten before autograd, and keep what is said of it."""
        gm, self.report = describe_captured(gm, self.report.saying(*notes))
        return gm

    def __getattr__(self, name):
        return getattr(self.report, name)


def operators(run):
    """Name the operators that loops became."""
    return names(row for graph in run.report.graphs for row in graph.applied)


def names(rows):
    """Name the operators that loops became, by the rows of a report."""
    return [row.detail.split(" as one ")[1] for row in rows if " as one " in row.detail]


def emitted(scan, *operands):
    """Build a graph of the scan alone, and run it."""
    graph = torch.fx.Graph()
    mode = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
    nodes = []
    for i, x in enumerate(operands):
        nodes.append(graph.placeholder(f"x{i}"))
        nodes[-1].meta["val"] = mode.from_tensor(x)
    anchor = graph.output(nodes[0])
    anchor.meta["val"] = nodes[0].meta["val"]
    emit = Builder()
    emit.at(anchor)
    results = scan(emit, *nodes)
    graph.erase_node(anchor)
    graph.output(tuple(results))
    differentiable(graph)
    return torch.fx.GraphModule({}, graph)(*operands)
