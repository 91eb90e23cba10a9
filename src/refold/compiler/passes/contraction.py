"""Recover contractions: a broadcast multiply and a sum is a matrix product, however it is spelled.

The sum is read in index notation (`refold.compiler.index`): a product of factors over symbols, some
of them summed. Symbols that no factor reads fall out (that alone removes the repeat of one ``B, C``
group to every head), ``opt_einsum`` orders the factors, and each pair becomes ``mm`` or ``bmm``.
Matrix products that are in the graph already are read the same way, and rewritten if a repeat falls
out of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import opt_einsum
import torch
from torch.fx import Graph, Node

from ..cost import concrete
from ..graph import Builder, UnknownSize
from ..index import Axis, Product, index, is_view, matmul_product, resolve, same, sum_dims, sum_product, value
from ..rewrite import Rewrite, replace_node

aten = torch.ops.aten

SUMS = (aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default)
MATMULS = (aten.mm.default, aten.bmm.default)
# A product must shrink at least this much for an existing matmul, or a sum without one, to be redone.
WORTHWHILE = 2


def drop_degenerate_sums(graph: Graph, wanted: Callable[[str], bool]) -> Iterator[Rewrite]:
    """Replace a sum over axes of size one by a view."""
    for root in list(graph.nodes):
        if root.target not in SUMS or not wanted(root.name):
            continue
        x = root.args[0]
        dims = sum_dims(root)
        if value(x).dtype != value(root).dtype or not dims or not all(same(value(x).shape[d], 1) for d in dims):
            continue
        build = Builder(root)
        view = x if value(root).dim() == value(x).dim() else build.call(aten.squeeze.dims, (x, dims))
        # A sum never aliases its input, so neither may this; Inductor inlines the copy.
        new = build.restride(build.call(aten.clone.default, (view,)), value(root))
        yield replace_node(
            root,
            new,
            inside=(),
            added=build.added,
            name="drop degenerate sum",
            detail=f"sum over axes of size 1 {dims}",
            multilinear=True,
            terms=1,
            free=True,
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
            build = Builder(root)
            try:
                new = build.restride(plan.lower(build), value(root))
            except UnknownSize:
                continue
            yield replace_node(
                root,
                new,
                inside=found.through,
                added=build.added,
                name="recover contraction" if root.target in SUMS else "drop repeat from product",
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
    """Tell whether the rewrite frees the large intermediate: nobody else reads the products."""
    inside = {*product.through, root}
    return root.target in MATMULS or all(
        user in inside or user.target in SUMS
        for node in product.through
        if node.target is aten.mul.Tensor and node in root.all_input_nodes
        for user in node.users
    )


@dataclass
class _Operand:
    """A node whose axes are exactly ``axes``, one atomic symbol each."""

    node: Node
    axes: list[Axis]


@dataclass
class _Plan:
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
        out = _spell([axis for axis in _layout(self.product) if axis in self.product.present()], letters)
        sizes = " ".join(f"{letter}={axis.size}" for axis, letter in letters.items())
        repeats = [str(axis.size) for axis in self.product.repeated()]
        dropped = f", repeat of {' x '.join(repeats)} dropped" if repeats else ""
        return f"{','.join(terms)}->{out} ({sizes}{dropped})"

    def lower(self, build: Builder) -> Node:
        """Insert the matrix products and lay the result out as the root had it."""
        operands = [_operand(build, factor) for factor in self.product.factors]
        out = [axis for axis in _layout(self.product) if axis in self.product.present()]
        for group in self.path:
            chosen = [operands[i] for i in group]
            operands = [operand for i, operand in enumerate(operands) if i not in group]
            keep = {*out, *(axis for operand in operands for axis in operand.axes)}
            operands.append(_contract(build, chosen, keep, out))
        (result,) = operands
        x = _sum_out(build, result, set(out))
        if self.scale != 1.0:
            x = _Operand(build.call(aten.mul.Tensor, (x.node, self.scale)), x.axes)
        return _lay_out(build, x, self.product, value(self.root).shape)


def _plan(root: Node, product: Product) -> _Plan | None:
    """Decide how to compute a product, or None if it is not worth a matrix product."""
    bound = resolve(product.bound)
    present = product.present()
    if not bound or not product.factors or any(axis not in present and not isinstance(axis.size, int) for axis in bound):
        return None
    everything = {*bound, *(axis for label in product.labels for axis in resolve(label))}
    out = [axis for axis in _layout(product) if axis in present]
    letters: dict[Axis, str] = {}
    terms = [_spell(factor.axes(), letters) for factor in product.factors]
    shapes = [tuple(concrete(axis.size) for axis in factor.axes()) for factor in product.factors]
    if len(terms) == 1:
        path: list[tuple[int, ...]] = []
    else:
        path, _ = opt_einsum.contract_path(f"{','.join(terms)}->{_spell(out, letters)}", *shapes, shapes=True)
    naive = math.prod(concrete(axis.size) for axis in everything)
    work, matmul = _work([set(factor.axes()) for factor in product.factors], path, set(out))
    shrinks = work * WORTHWHILE <= naive
    if not (shrinks or (matmul and root.target in SUMS)):
        return None
    scale = product.scale * math.prod(axis.size for axis in bound if axis not in present)
    if root.target in (aten.mean.dim, aten.mean.default):
        scale /= math.prod(concrete(axis.size) for axis in bound)
        if any(not isinstance(axis.size, int) for axis in bound):
            return None
    return _Plan(root, product, list(path), scale, math.prod(concrete(axis.size) for axis in bound))


def _work(factors: list[set[Axis]], path: list[tuple[int, ...]], out: set[Axis]) -> tuple[int, bool]:
    """Return the multiply-adds of a path, and whether it has a true matrix product (M, N, K > 1)."""
    total = sum(math.prod(concrete(axis.size) for axis in factor) for factor in factors) if not path else 0
    matmul = False
    for group in path:
        chosen = [factors[i] for i in group]
        factors = [factor for i, factor in enumerate(factors) if i not in group]
        union = set.union(*chosen)
        keep = union & set.union(out, *factors)
        total += math.prod(concrete(axis.size) for axis in union)
        if len(chosen) == 2:
            a, b = chosen
            matmul = matmul or bool((a & b) - keep and (a & keep) - b and (b & keep) - a)
        factors.append(keep)
    return total, matmul


def _layout(product: Product) -> list[Axis]:
    return [axis for label in product.labels for axis in resolve(label)]


def _spell(axes, letters: dict[Axis, str]) -> str:
    return "".join(letters.setdefault(axis, opt_einsum.get_symbol(len(letters))) for axis in axes)


def _operand(build: Builder, factor) -> _Operand:
    """Insert a factor's pending steps and give every symbol an axis of its own."""
    node = factor.node
    for step in factor.steps:
        node = step(build, node)
    axes = list(factor.axes())
    return _Operand(build.reshape(node, [[axis.size] for axis in axes]), axes)


def _sum_out(build: Builder, x: _Operand, keep: set[Axis]) -> _Operand:
    """Sum over the axes that nothing else reads."""
    dims = [i for i, axis in enumerate(x.axes) if axis not in keep]
    if not dims:
        return x
    return _Operand(build.call(aten.sum.dim_IntList, (x.node, dims)), [axis for axis in x.axes if axis in keep])


def _contract(build: Builder, operands: list[_Operand], keep: set[Axis], out: list[Axis]) -> _Operand:
    """Multiply operands and sum over what is not kept; two at a time."""
    *rest, last = operands
    if not rest:
        return _sum_out(build, last, keep)
    a = rest[0] if len(rest) == 1 else _contract(build, rest, {*keep, *last.axes}, out)
    a = _sum_out(build, a, {*keep, *last.axes})
    b = _sum_out(build, last, {*keep, *a.axes})
    shared = [axis for axis in a.axes if axis in b.axes]
    summed = [axis for axis in shared if axis not in keep]
    rows = [axis for axis in a.axes if axis not in b.axes]
    columns = [axis for axis in b.axes if axis not in a.axes]
    if not (summed and rows and columns):
        return _sum_out(build, _multiply(build, a, b, out), keep)
    batch = [axis for axis in shared if axis in keep]
    left = _matrix(build, a, batch, rows, summed)
    right = _matrix(build, b, batch, summed, columns)
    result = build.call(aten.bmm.default if batch else aten.mm.default, (left, right))
    axes = [*batch, *rows, *columns]
    return _Operand(build.reshape(result, [[axis.size] for axis in axes]), axes)


def _matrix(build: Builder, x: _Operand, *groups: list[Axis]) -> Node:
    """Merge axes into (batch,) rows and columns."""
    order = [x.axes.index(axis) for group in groups for axis in group]
    groups = groups if groups[0] else groups[1:]
    return build.reshape(build.permute(x.node, order), [[axis.size for axis in group] for group in groups])


def _multiply(build: Builder, a: _Operand, b: _Operand, out: list[Axis]) -> _Operand:
    """Multiply elementwise, broadcasting; axes in the order of the output where they reach it."""
    axes = sorted({*a.axes, *b.axes}, key=lambda axis: out.index(axis) if axis in out else len(out))
    nodes = []
    for x in (a, b):
        node = build.permute(x.node, [x.axes.index(axis) for axis in axes if axis in x.axes])
        for dim, axis in enumerate(axes):
            if axis not in x.axes:
                node = build.call(aten.unsqueeze.default, (node, dim))
        nodes.append(node)
    return _Operand(build.call(aten.mul.Tensor, tuple(nodes)), axes)


def _lay_out(build: Builder, x: _Operand, product: Product, shape) -> Node:
    """Permute, repeat and merge axes into the labels of a product."""
    layout = _layout(product)
    node = build.permute(x.node, [x.axes.index(axis) for axis in layout if axis in x.axes])
    if missing := [dim for dim, axis in enumerate(layout) if axis not in x.axes]:
        for dim in missing:
            node = build.call(aten.unsqueeze.default, (node, dim))
        node = build.call(aten.expand.default, (node, [build.size(axis.size) for axis in layout]))
    return build.reshape(node, [[size] for size in shape])


__all__ = ["drop_degenerate_sums", "index", "recover_contractions"]
