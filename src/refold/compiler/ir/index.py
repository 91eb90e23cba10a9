"""Index notation: what each axis of each value in an ATen graph means.

Every tensor axis has a tuple of `Axis` symbols, outermost first. A plain axis has one symbol, an axis that a reshape
merged has several, and an axis of size one has none. Views, permutations, ``expand`` and broadcasting only move symbols
between axes, so a value is a `Product` of `Factor`s, each a node read at some of the symbols. A symbol that no factor
reads is a *repeat*: the value is constant along it. That is all the contraction passes need to know.

Two rules keep this sound. Symbols are unified only where the graph itself multiplies two axes element by element. Every
*use* of a node gets symbols of its own. If the two uses of ``x`` in ``x * x.T`` shared theirs, the product would become
its diagonal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from .fx import MATMULS, arg, is_elementwise, is_tensor, same, sum_dims, value
from .symbols import Axis, Label, atoms, broadcast, resolve, unify
from .views import is_view, viewed

aten = torch.ops.aten

CONTRACTIONS = (aten.sum.dim_IntList, *MATMULS)
# Past this many factors a product is opaque: path search is exponential in it.
MAX_FACTORS = 8


@dataclass(frozen=True)
class PendingOp:
    """A unary operation, or a resizing one, that runs on a smaller value than in the graph.

    ``dims`` tells for each axis that ``node`` resizes which axis of the smaller value that is;
    the value is multiplied by ``scale`` before.
    """

    node: Node
    dims: tuple[tuple[int, int], ...]
    scale: float

    def __call__(self, builder: Any, x: Node) -> Node:
        """Insert the operation on ``x``."""
        x = builder.times(x, self.scale)
        return builder.call(self.node.target, *_moved_args(self.node, x, dict(self.dims)), **self.node.kwargs)


@dataclass(frozen=True)
class Factor:
    """A node read at symbols: ``labels[i]`` names axis ``i`` of ``node``.

    ``pending`` are operations still to be applied to the node, pushed below a repeat so that they run
    on the small value. ``linear`` tells whether all of them are (padding with zeros and slicing are).
    """

    node: Node
    labels: tuple[Label, ...]
    pending: tuple[PendingOp, ...] = ()
    linear: bool = True

    def axes(self) -> Label:
        """Return the atomic symbols this factor depends on."""
        return atoms(self.labels)

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for equal reads of one node."""
        return self.node, self.pending, tuple(map(resolve, self.labels))


@dataclass(frozen=True)
class Product:
    """``scale * factor * factor * ...`` laid out over ``labels``, summed over ``bound``."""

    labels: tuple[Label, ...]
    factors: tuple[Factor, ...]
    scale: float = 1.0
    bound: Label = ()
    # Graph nodes looked through on the way to the factors: what a rewrite makes dead.
    through: tuple[Node, ...] = field(default=())

    def present(self) -> set[Axis]:
        """Return the atomic symbols that at least one factor depends on."""
        return {axis for factor in self.factors for axis in factor.axes()}

    def repeated(self) -> list[Axis]:
        """Return the symbols of the layout along which the value is constant."""
        present = self.present()
        return [axis for axis in atoms(self.labels) if axis not in present]


def leaf(node: Node) -> Product:
    """Read a node as itself, with fresh symbols."""
    labels = tuple(() if same(size, 1) else (Axis(size),) for size in value(node).shape)
    return Product(labels, (Factor(node, labels),))


def index(node: Node, absorb: Callable[[Node], bool] = lambda _: False, top: bool = True) -> Product:
    """Read a graph node in index notation.

    Args:
        node: A node holding one tensor.
        absorb: Which inner sums to look through (their symbols become bound).
        top: Expand a multiplication at the top even if one operand already spans the result.

    Returns:
        A product equal to the node's value; at worst the node itself.
    """
    product = _look_through(node, absorb, top)
    return leaf(node) if product is None else replace(product, through=(*product.through, node))


def _look_through(node: Node, absorb: Callable[[Node], bool], top: bool) -> Product | None:
    """Return the product that one operation computes, or None when the node must be taken as it is."""
    if node.op != "call_function" or not is_tensor(node):
        return None
    if any(same(size, 0) for size in value(node).shape):
        return None
    if is_view(node):
        inner = index(arg(node, 0), absorb, top)
        labels = viewed(node, inner.labels)
        return None if labels is None else replace(inner, labels=labels)
    if node.target is aten.constant_pad_nd.default and all(same(size, 0) for size in arg(node, 1)):
        return index(arg(node, 0), absorb, top)  # the chunks were full
    if node.target is aten.mul.Tensor:
        return _multiply(node, absorb, top)
    if node.target is aten.neg.default and value(node).is_floating_point():
        inner = index(arg(node, 0), absorb, top)
        return replace(inner, scale=-inner.scale)
    if node.target is aten.sum.dim_IntList and absorb(node):
        return sum_product(node, absorb)
    if node.target in MATMULS and same(value(arg(node, 0)).shape[-1], 1):
        return matmul_product(node)  # an outer product: nothing is summed
    return _push_below_repeat(node, absorb)


def _multiply(node: Node, absorb: Callable[[Node], bool], top: bool) -> Product | None:
    a, b = arg(node, 0), arg(node, 1)
    if not value(node).is_floating_point():
        return None
    if is_tensor(a) and isinstance(b, (int, float)):
        inner = index(a, absorb, top)
        return replace(inner, scale=inner.scale * b) if value(a).dtype == value(node).dtype else None
    if not (is_tensor(a) and is_tensor(b) and value(a).dtype == value(b).dtype == value(node).dtype):
        return None
    # Only the outermost multiplication is expanded unconditionally; see `_is_outer`.
    left, right = index(a, absorb, top=False), index(b, absorb, top=False)
    joined = align(left, right) or align(leaf(a), leaf(b))
    if joined is None or len(joined.factors) > MAX_FACTORS or not (top or _is_outer(joined, left, right)):
        return None
    return joined


def align(left: Product, right: Product) -> Product | None:
    """Broadcast two products against each other."""
    labels = broadcast(left.labels, right.labels)
    if labels is None:
        return None
    return Product(
        labels,
        left.factors + right.factors,
        left.scale * right.scale,
        left.bound + right.bound,
        left.through + right.through,
    )


def _is_outer(product: Product, left: Product, right: Product) -> bool:
    """Tell whether a product is larger than each operand, so that a contraction gains by seeing both.

    Otherwise it is an elementwise scaling: better fused into the operand than carried as a factor.
    """
    axes = {*atoms(product.labels)}
    return all(axes - {axis for f in side.factors for axis in f.axes()} for side in (left, right))


def sum_product(node: Node, absorb: Callable[[Node], bool] = lambda _: False) -> Product | None:
    """Read ``sum(x, dims)`` as a product with bound symbols; None if dtypes change on the way."""
    x = arg(node, 0)
    if not (is_tensor(x) and value(x).is_floating_point() and value(x).dtype == value(node).dtype):
        return None
    inner = index(x, absorb)
    dims = set(sum_dims(node))
    keepdim = bool(arg(node, 2, "keepdim", False))
    bound = tuple(axis for dim in dims for axis in inner.labels[dim])
    labels = tuple(() if dim in dims else label for dim, label in enumerate(inner.labels) if keepdim or dim not in dims)
    return replace(inner, labels=labels, bound=inner.bound + bound)


def matmul_product(node: Node) -> Product | None:
    """Read ``mm`` or ``bmm`` as a product with one bound symbol."""
    a, b = arg(node, 0), arg(node, 1)
    if not (value(node).is_floating_point() and all(is_tensor(x) for x in (a, b))):
        return None
    left, right = index(a, top=False), index(b, top=False)
    pairs = [*zip(left.labels[:-2], right.labels[:-2], strict=True), (left.labels[-1], right.labels[-2])]
    for x, y in pairs:
        if not unify(x, y):
            return None
    return Product(
        (*left.labels[:-1], right.labels[-1]),
        left.factors + right.factors,
        left.scale * right.scale,
        left.bound + right.bound + left.labels[-1],
        left.through + right.through,
    )


def contraction(node: Node) -> Product | None:
    """Read a sum over axes or a product of matrices; None if it is neither."""
    if node.target is aten.sum.dim_IntList:
        return sum_product(node)
    return matmul_product(node) if node.target in MATMULS else None


def read_further(node: Node, sums: bool = True) -> Product | None:
    """Read a node as a product of something else, through sums if asked to; None if it is what it is."""
    inner = contraction(node) if sums and node.target in CONTRACTIONS else index(node)
    return None if inner is None or any(factor.node is node for factor in inner.factors) else inner


def expand(product: Product, inner: Callable[[Node], Product | None] | None = None) -> Product:
    """Read every factor further, through views, products and contractions, down to what is neither.

    Past `MAX_FACTORS` what is left is taken as it is. ``inner`` may read nodes otherwise; None is what it is.
    """
    factors: list[Factor] = []
    scale, bound, through = product.scale, product.bound, product.through
    unread = list(product.factors)
    while unread:
        factor = unread.pop(0)
        full = bool(factor.pending) or len(factors) + len(unread) >= MAX_FACTORS
        found = None if full else (inner or read_further)(factor.node)
        if found is None or not all(unify(x, y) for x, y in zip(found.labels, factor.labels, strict=True)):
            factors.append(factor)
            continue
        unread = [*found.factors, *unread]
        scale, bound, through = scale * found.scale, bound + found.bound, through + found.through
    return Product(product.labels, tuple(factors), scale, bound, through)


def _push_below_repeat(node: Node, absorb: Callable[[Node], bool]) -> Product | None:
    """Read ``op(repeat(x))`` as ``repeat(op(x))`` for unary ``op``, padding and slicing.

    None unless there is a repeat: otherwise nothing is gained over taking the node itself.
    """
    others = (*node.args[1:], *node.kwargs.values())
    if not (node.args and is_tensor(arg(node, 0))) or any(isinstance(x, Node) for x in others):
        return None
    moved = _resized_axes(node) if node.target in _RESIZING else [] if is_elementwise(node.target) else None
    if moved is None:
        return None
    inner = index(arg(node, 0), absorb, top=False)
    if len(inner.factors) != 1 or inner.bound or not inner.repeated():
        return None
    (factor,) = inner.factors
    scale = inner.scale
    renamed: dict[Axis, Label] = {}
    for dim in moved:
        label = resolve(inner.labels[dim])
        if len(label) != 1 or label not in [resolve(own) for own in factor.labels]:
            return None  # the resized axis is merged with others, or is itself the repeat
        size = value(node).shape[dim]
        renamed[label[0]] = () if same(size, 1) else (Axis(size),)

    def rename(labels: Sequence[Label]) -> tuple[Label, ...]:
        return tuple(tuple(new for axis in resolve(label) for new in renamed.get(axis, (axis,))) for label in labels)

    position = {own[0]: i for i, label in enumerate(factor.labels) if len(own := resolve(label)) == 1}
    dims = {dim: position[resolve(inner.labels[dim])[0]] for dim in moved}

    pending = PendingOp(node, tuple(dims.items()), scale)
    linear = node.target is aten.slice.Tensor or (
        node.target is aten.constant_pad_nd.default and not any(node.args[2:])
    )
    pushed = Factor(factor.node, rename(factor.labels), (*factor.pending, pending), factor.linear and linear)
    return Product(rename(inner.labels), (pushed,), through=inner.through)


def _resized_axes(node: Node) -> Iterable[int]:
    """Return the axes that a pad or slice really touches."""
    return [arg(node, 1, "dim", 0) % value(node).dim()] if node.target is aten.slice.Tensor else padding(node)


def padding(node: Node) -> dict[int, tuple[int, int]]:
    """Return how much a node pads each axis before and after, if at all."""
    pad, rank = arg(node, 1), value(node).dim()
    pairs = {rank - 1 - k: (pad[2 * k], pad[2 * k + 1]) for k in range(len(pad) // 2)}
    return {dim: pair for dim, pair in pairs.items() if pair != (0, 0)}


def _moved_args(node: Node, x: Node, dims: dict[int, int]) -> tuple[Any, ...]:
    """Return a node's arguments for a value whose axes sit elsewhere."""
    if node.target is aten.slice.Tensor:
        return (x, next(iter(dims.values())), *node.args[2:])
    if node.target is aten.constant_pad_nd.default:
        rank, pad = len(value(x).shape), [0, 0] * len(value(x).shape)
        for dim, pair in padding(node).items():
            start = 2 * (rank - 1 - dims[dim])
            pad[start : start + 2] = pair
        return (x, pad, *node.args[2:])
    return (x, *node.args[1:])


_RESIZING = {aten.constant_pad_nd.default, aten.slice.Tensor}
