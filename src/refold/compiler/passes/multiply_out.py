"""Multiply out sums of products of sums: do the same additions and multiplications in an order with fewer of them.

``sum over n of (x @ W.T + bias)`` is ``x @ (sum over n of W) + sum of bias``: a product of matrices less. The same pass
orders chains of products and reads a product with a diagonal matrix as the scaling that it is. The algebra is
`refold.compiler.notation.algebra`; here nodes are chosen, and the result is put in their place.

Values may have any shape. Source: Aji & McEliece 2000, "The Generalized Distributive Law".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import torch
from torch.fx import Graph, Node

from ...errors import ProgramError
from ..ir.builder import Builder, between, walk
from ..ir.fx import CONVERT, value
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


_LINEAR = (
    *_PRODUCTS,
    *_ROOTS,
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.neg.default,
    aten.eq.Tensor,
    CONVERT,
    aten._to_copy.default,
)
_LOOKED_AT = 64


def multiply_out(graph: Graph, wanted: Callable[[str], bool]) -> Iterator[Rewrite]:
    """Replace sums of products of sums by the same in the order of least work."""
    roots = [node for node in graph.nodes if node.target in _ROOTS and node.users]
    roots = [root for root in roots if _reads_product(root)]
    if not roots:
        return
    reading = read(graph)
    steps = reading.program.defined()
    for root in reversed(roots):  # the last of a chain sees all of it
        if root not in reading.names or not wanted(root.name) or not value(root).dtype.is_floating_point:
            continue
        name = reading.names[root]
        step = steps.get(name)
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
            new = build.restride(build.reshape(new, list(value(root).shape)), value(root))
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
        steps = reading.program.defined()


def _behind(root: Node) -> list[Node]:
    """List what a root reads through views, sums, products, scalings and diagonals; a few dozen nodes at most."""
    behind = walk(root.all_input_nodes, lambda x: x.all_input_nodes if is_view(x) or x.target in _LINEAR else ())
    return list(islice((node for node in behind if node.op == "call_function"), _LOOKED_AT))


def _reads_product(root: Node) -> bool:
    """Tell whether a sum or a product reads a product of matrices, or a diagonal."""
    return any(node.target in _PRODUCTS for node in _behind(root))


def _inner(reading: Reading, root: Node) -> frozenset[str]:
    """Return the values that serve nothing but the root, and are of its dtype."""
    dtype, serving, grown = value(root).dtype, {root}, True
    behind = _behind(root)
    while grown:
        fresh = [node for node in behind if node not in serving and all(user in serving for user in node.users)]
        serving.update(fresh)
        grown = bool(fresh)
    names = set()
    for node in serving:
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor) and (val.dtype == dtype or not val.dtype.is_floating_point):
            names |= {f"{node.name}_product"} if node is root else {reading.names.get(node, ""), f"{node.name}_product"}
    return frozenset(names)
