"""Recover contractions: a broadcast multiply and a sum is a matrix product, however it is spelled.

The sum is read in index notation (`refold.compiler.ir.index`): a product of factors over symbols, some of them summed.
Symbols that no factor reads are dropped. That alone removes the repeat of one ``B, C`` group to every head.
``opt_einsum`` orders the factors (Smith & Gray 2018, doi:10.21105/joss.00753), and each pair becomes ``mm`` or ``bmm``.
Matrix products that are in the graph already are read the same way, and rewritten if a repeat falls out of them.

Values may have any shape; an operand of a product has one axis per symbol.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import opt_einsum
import torch
from torch.fx import Graph, Node

from ..ir.builder import Builder, UnknownSize
from ..ir.contract import Operand, contract_in_order, lay_out, least_work, operand
from ..ir.fx import MATMULS, arg, concrete, same, sum_dims, value
from ..ir.index import Product, matmul_product, sum_product
from ..ir.rewrite import Rewrite, replace_node
from ..ir.symbols import Axis, atoms, resolve
from ..ir.views import is_view

aten = torch.ops.aten

SUMS = (aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default)
_MEANS = (aten.mean.dim, aten.mean.default)
# A product must shrink at least this much for an existing matmul, or a sum without one, to be redone.
WORTHWHILE = 2


def drop_degenerate_sums(graph: Graph, wanted: Callable[[str], bool]) -> Iterator[Rewrite]:
    """Replace a sum over axes of size one by a view."""
    for root in list(graph.nodes):
        if root.target not in SUMS or not wanted(root.name):
            continue
        x = arg(root, 0)
        dims = sum_dims(root)
        if value(x).dtype != value(root).dtype or not dims or not all(same(value(x).shape[d], 1) for d in dims):
            continue
        build = Builder(root)
        view = x if value(root).dim() == value(x).dim() else build.call(aten.squeeze.dims, x, dims)
        # A sum never aliases its input, so neither may this; Inductor inlines the copy.
        new = build.copy(view, value(root))
        yield replace_node(
            root,
            new,
            inside=(),
            added=build.added,
            name="drop degenerate sum",
            why="nothing is added up",
            detail=f"sum over axes of size 1 {dims}",
            multilinear=True,
            terms=1,
            timed_alone=False,
        )
        graph.erase_node(root)


def recover_contractions(graph: Graph, wanted: Callable[[str], bool]) -> Iterator[Rewrite]:
    """Turn multiply-and-sum into matrix products, and drop repeats from matrix products."""
    for absorb in (_single_use, lambda _: False):
        for root in list(graph.nodes):
            if root.target not in (*SUMS, *MATMULS) or not wanted(root.name) or not root.users:
                continue
            if absorb is _single_use and _feeds_sum(root):
                continue  # the sum that it feeds sees further
            found = _read(root, absorb)
            if found is None or (plan := _plan(root, found)) is None or not _consumed(root, found):
                continue
            build = Builder(root, found.through)
            try:
                new = build.restride(plan.lower(build), value(root))
            except UnknownSize:
                build.undo()
                continue
            yield replace_node(
                root,
                new,
                inside=found.through,
                added=build.added,
                name="recover contraction" if root.target in SUMS else "drop repeat from product",
                why=plan.why(),
                detail=plan.describe(),
                multilinear=all(factor.linear for factor in found.factors),
                terms=plan.terms,
            )
            graph.eliminate_dead_code()


def _single_use(node: Node) -> bool:
    return len(node.users) == 1


def _feeds_sum(node: Node) -> bool:
    """Tell whether a node's only use, through views, is a sum."""
    while len(node.users) == 1:
        (node,) = node.users
        if node.target is aten.sum.dim_IntList:
            return True
        if not is_view(node):
            return False
    return False


def _read(root: Node, absorb: Callable[[Node], bool]) -> Product | None:
    if any(same(size, 0) for arg in root.all_input_nodes for size in value(arg).shape):
        return None
    return matmul_product(root) if root.target in MATMULS else sum_product(root, absorb)


def _consumed(root: Node, product: Product) -> bool:
    """Tell whether the rewrite frees the large intermediate: nothing else reads the products."""
    inside = {*product.through, root}
    return root.target in MATMULS or all(
        user in inside or user.target in SUMS
        for node in product.through
        if node.target is aten.mul.Tensor and node in root.all_input_nodes
        for user in node.users
    )


@dataclass
class _Einsum:
    """An einsum and the order in which to do it."""

    root: Node
    product: Product
    path: list[tuple[int, ...]]
    scale: float
    terms: int

    def describe(self) -> str:
        """Spell the einsum with the sizes of its symbols."""
        letters: dict[Axis, str] = {}
        terms = [_spell(factor.axes(), letters) for factor in self.product.factors]
        out = _spell([axis for axis in atoms(self.product.labels) if axis in self.product.present()], letters)
        sizes = " ".join(f"{letter}={axis.size}" for axis, letter in letters.items())
        repeats = [str(axis.size) for axis in self.product.repeated()]
        dropped = f", repeat of {' x '.join(repeats)} dropped" if repeats else ""
        return f"{','.join(terms)}->{out} ({sizes}{dropped})"

    def why(self) -> str:
        """Say what is wasteful about the original."""
        copies = math.prod(concrete(axis.size) for axis in self.product.repeated())
        reasons = [f"it is computed for {copies} equal copies"] if copies > 1 else []
        if self.root.target in SUMS:
            reasons.insert(0, "products are written out only to be summed")
        elif not reasons:
            reasons.append("its factors allow a cheaper order")
        return ", and ".join(reasons)

    def lower(self, build: Builder) -> Node:
        """Insert the matrix products and lay the result out as the root had it."""
        operands = [operand(build, factor) for factor in self.product.factors]
        # Half precision overflows early: what makes a product smaller does so before it is summed.
        shrinks = abs(self.scale) < 1 and value(self.root).dtype == torch.float16
        if shrinks:
            operands[0].node = build.times(operands[0].node, self.scale)
        out = [axis for axis in atoms(self.product.labels) if axis in self.product.present()]
        x = contract_in_order(build, operands, self.path, out)
        if not shrinks:
            x = Operand(build.times(x.node, self.scale), x.axes)
        if self.root.target in _MEANS:
            count = build.size(math.prod(value(arg(self.root, 0)).shape[dim] for dim in sum_dims(self.root)))
            x = Operand(build.call(aten.div.Tensor, x.node, count), x.axes)
        return lay_out(build, x, self.product)


def _plan(root: Node, product: Product) -> _Einsum | None:
    """Decide how to compute a product, or None if it is not worth a matrix product."""
    bound = resolve(product.bound)
    present = product.present()
    absent = [axis.size for axis in bound if axis not in present]
    if not bound or not all(isinstance(size, int) for size in absent):
        return None
    if (
        root.target in _MEANS and value(root).dtype == torch.float16
    ):  # ATen sums it in float32, and divides before rounding
        return None
    everything = {*bound, *atoms(product.labels)}
    out = [axis for axis in atoms(product.labels) if axis in present]
    factors = [factor.axes() for factor in product.factors]
    path = least_work(factors, out, lambda axis: concrete(axis.size)) if len(factors) > 1 else []
    naive = math.prod(concrete(axis.size) for axis in everything)
    work, matmul = _work([*map(set, factors)], path, set(out))
    shrinks = work * WORTHWHILE <= naive
    if not (shrinks or (matmul and root.target in SUMS)):
        return None
    scale = product.scale * math.prod(absent)
    return _Einsum(root, product, path, float(scale), math.prod(concrete(axis.size) for axis in bound))


def _work(factors: list[set[Axis]], path: list[tuple[int, ...]], out: set[Axis]) -> tuple[int, bool]:
    """Return the multiply-adds of a path, and whether it has a true matrix product (M, N, K > 1)."""
    total = sum(math.prod(concrete(axis.size) for axis in factor) for factor in factors) if not path else 0
    matmul = False
    for group in path:
        chosen = [factors[i] for i in group]
        factors = [factor for i, factor in enumerate(factors) if i not in group]
        union: set[Axis] = set().union(*chosen)
        keep = union & out.union(*factors)
        total += math.prod(concrete(axis.size) for axis in union)
        if len(chosen) == 2:
            a, b = chosen
            matmul = matmul or bool((a & b) - keep and (a & keep) - b and (b & keep) - a)
        factors.append(keep)
    return total, matmul


def _spell(axes: Iterable[Axis], letters: dict[Axis, str]) -> str:
    return "".join(letters.setdefault(axis, opt_einsum.get_symbol(len(letters))) for axis in axes)
