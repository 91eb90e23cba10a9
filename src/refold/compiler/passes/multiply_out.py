"""Multiply out sums of products of sums: do the same additions and multiplications in an order with fewer of them.

``sum over n of (x @ W.T + bias)`` is ``x @ (sum over n of W) + sum of bias``: a product of matrices less. The same pass
orders chains of products and reads a product with a diagonal matrix as the scaling that it is. The algebra is
`refold.compiler.notation.algebra`; here nodes are chosen, and the result is put in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.fx import Graph, Node

from ...errors import ProgramError
from ..ir.builder import Builder, between
from ..ir.fx import value
from ..ir.rewrite import Rewrite, replace_node
from ..ir.views import is_view
from ..notation.algebra import SUMS, cheaper
from ..notation.lower import lower
from ..notation.read import Reading, lettered, read

aten = torch.ops.aten

# The new order must have so many times fewer multiply-adds.
WORTHWHILE = 2
_PRODUCTS = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten.where.self)
_ROOTS = (aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default, aten.mm.default, aten.bmm.default)


def multiply_out(graph: Graph, wanted: Callable[[str], bool]) -> Iterator[Rewrite]:
    """Replace sums of products of sums by the same in the order of least work."""
    roots = [node for node in graph.nodes if node.target in _ROOTS and node.users]
    if not any(_reads_product(root) for root in roots):
        return
    reading = read(graph)
    for root in reversed(roots):  # the last of a chain sees all of it
        if root not in reading.names or not wanted(root.name) or not value(root).dtype.is_floating_point:
            continue
        name = reading.names[root]
        step = reading.program.defined().get(name)
        if step is None or step.do not in SUMS:
            continue
        found = cheaper(reading.program, name, _inner(reading, root), WORTHWHILE)
        if found is None:
            continue
        program = found.program
        inputs = {own: reading.nodes[own] for own in program.inputs}
        if not all(isinstance(node, Node) for node in inputs.values()):
            continue
        inside = between(root, inputs.values())
        build = Builder(root, inside)
        try:
            new = lower(program, build, inputs)
            if value(new).dtype != value(root).dtype:
                raise ProgramError("its dtype is another")
            new = build.restride(build.reshape(new, [[int(size)] for size in value(root).shape]), value(root))
        except ProgramError:
            build.undo()
            continue
        yield replace_node(
            root,
            new,
            inside=inside,
            added=build.added,
            name="multiply out",
            why="the same sums in another order are less work",
            detail="; ".join(str(lettered(program)).splitlines()[:-1]),
            multilinear=found.multilinear,
            terms=found.terms,
        )
        graph.eliminate_dead_code()
        reading = read(graph)


def _reads_product(root: Node) -> bool:
    """Tell whether a sum or product reads, through elementwise operations, a product of matrices or a diagonal."""
    seen, stack = set[Node](), list(root.all_input_nodes)
    while stack and len(seen) < 64:
        node = stack.pop()
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        if node.target in (
            aten.mm.default,
            aten.bmm.default,
            aten.addmm.default,
            aten.baddbmm.default,
            aten.where.self,
        ):
            return True
        pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
        if pointwise or is_view(node) or node.target in _ROOTS:
            stack += node.all_input_nodes
    return False


def _inner(reading: Reading, root: Node) -> frozenset[str]:
    """Return the values that serve nothing but the root, and are of its dtype."""
    dtype = value(root).dtype
    serving = {root}
    for node in reversed(list(reading.graph.nodes)):
        if (
            node is not root
            and node.users
            and all(user in serving for user in node.users)
            and node.op == "call_function"
        ):
            serving.add(node)
    names = set()
    for name, node in reading.nodes.items():
        own = getattr(node, "node", node)
        if own in serving and (own is not root or own is not node):
            val = own.meta.get("val")
            if isinstance(val, torch.Tensor) and (val.dtype == dtype or not val.dtype.is_floating_point):
                names.add(name)
    return frozenset(names)
