"""Turn linear recurrences that are computed as parallel prefix networks into scans.

PyTorch's ``associative_scan``, and scans by doubling or by trees that people write themselves, combine neighbours in
time, in passes over all of memory. `refold.compiler.recurrence.prefix` reads what they compute.

Shapes. Values are (..., t, ...), and stay so. Sources: as there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.fx import Graph, Node

from ..ir.builder import Builder, between, upstream
from ..ir.fx import concrete, is_training, value
from ..ir.rewrite import Rewrite, replace_node
from ..ir.views import is_view
from ..recurrence.affine import Affine, Loop, LoopVectorizer
from ..recurrence.prefix import Found, recurrences
from ..recurrence.vectorize import NotALoop, Value

aten = torch.ops.aten

WHY = "its states are combined pair by pair, in passes over all of memory"


def replace_prefix_networks(graph: Graph, wanted: Callable[[str], bool]) -> Iterator[Rewrite]:
    """Replace values (..., t, ...) that are recurrences along an axis by ``linear_scan``."""
    if is_training(graph):
        return  # the backward reads what the network computes on its way
    done, replaced = set[object](), dict[Node, Node]()
    for found in recurrences(list(graph.nodes)):
        what = (found.a, found.exponent, found.b, found.reverse)
        if what in done or not found.node.users:
            continue
        done.add(what)
        if wanted(found.node.name) and (made := _scanned(found, replaced)) is not None:
            yield made
    if replaced:
        graph.eliminate_dead_code()  # what is left of a network reads the states, which later passes take for a reader


def _scanned(found: Found, replaced: dict[Node, Node]) -> Rewrite | None:
    """Replace one recurrence; None if the operator does not take it.

    Args:
        found: The recurrence.
        replaced: What stands for the recurrences that were replaced before; gets this one.
    """
    root, dim, vectorizer = found.node, found.dim, LoopVectorizer()
    rank, emit = value(root).dim(), vectorizer.emit
    emit.at(root)

    def over_time(x: Node) -> Value:
        """Return an operand, broadcast to (..., t, ...), with time as axis 0: (t, ...)."""
        own = dim - (rank - value(x).dim())
        return Value(emit.permute(x, [own, *(d for d in range(value(x).dim()) if d != own)]), True)

    operands = [replaced.get(x, x) for x in (found.a, found.b) if x is not None]
    step = emit.call(aten.select.int, root, dim, 0)
    loop = Loop((step,), reverse=found.reverse, initial=0, count=value(root).shape[dim])
    decay = None if found.a is None else operands[0]
    if decay is not None and found.exponent:
        decay = emit.call(aten.exp.default, decay)
    try:
        scale = None if decay is None else over_time(decay)
        states = vectorizer._scan(loop, Affine(loop, scale, over_time(operands[-1])))
    except NotALoop:
        return None
    new = emit.permute(states.node, [*range(1, dim + 1), 0, *range(dim + 1, rank)])
    build = Builder(root)
    new = build.restride(new, value(root))
    emit.added.remove(step)
    root.graph.erase_node(step)
    replaced[root] = new
    # The network may view what the operands are views of otherwise: both versions of the region start from that.
    views, sources, live = dict[Node, None](), set[Node](), upstream(new)
    for x in operands:
        while is_view(x):
            views[x] = None
            x = x.all_input_nodes[0]
        sources.add(x)
    return replace_node(
        root,
        new,
        inside=between(root, sources),
        added=[*views, *(x for x in (*emit.added, *build.added) if x in live)],
        name="replace prefix network",
        why=WHY,
        detail=loop.described + (", against time" if found.reverse else ""),
        multilinear=False,
        terms=max(concrete(n) for n in value(root).shape),
        spread=0.1,
    )
