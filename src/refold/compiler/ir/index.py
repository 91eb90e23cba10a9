"""Index notation: what each axis of each value in an ATen graph means.

Every tensor axis carries a tuple of `Axis` symbols, outermost first: one symbol for a plain axis,
several for an axis that a reshape merged, none for an axis of size one. Views, permutations,
``expand`` and broadcasting only move symbols between axes, so a value is a `Product` of `Factor`s,
each a node read at some of the symbols. A symbol that no factor reads is a *repeat*: the value is
constant along it. That is all the contraction passes need to know.

Two rules keep this sound. Symbols are unified only where the graph itself multiplies two axes
element by element. And every *use* of a node gets symbols of its own: in ``x * x.T`` the two
occurrences of ``x`` must not share theirs, or the product would collapse onto the diagonal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten

Size = int | torch.SymInt
# Past this many factors a product is opaque: path search is exponential in it.
MAX_FACTORS = 8


class Axis:
    """A symbol with a size. Unification and splitting redirect it to the symbols that replace it."""

    __slots__ = ("_replacement", "size")

    def __init__(self, size: Size) -> None:
        self.size = size
        self._replacement: tuple[Axis, ...] | None = None

    def resolve(self) -> tuple[Axis, ...]:
        """Return the atomic symbols that this one stands for now."""
        if self._replacement is None:
            return (self,)
        return tuple(part for axis in self._replacement for part in axis.resolve())

    def redirect(self, *replacement: Axis) -> None:
        """Let this atomic symbol stand for others from now on."""
        self._replacement = replacement


Label = tuple[Axis, ...]


def resolve(label: Iterable[Axis]) -> Label:
    """Expand a label into atomic symbols."""
    return tuple(part for axis in label for part in axis.resolve())


@dataclass(frozen=True)
class Step:
    """A unary operation, or a resizing one, that runs on a smaller value than in the graph.

    ``dims`` tells for each axis that ``node`` resizes which axis of the smaller value that is;
    the value is multiplied by ``scale`` before.
    """

    node: Node
    dims: tuple[tuple[int, int], ...]
    scale: float

    def __call__(self, builder: Any, x: Node) -> Node:
        """Insert the operation on ``x``."""
        if self.scale != 1.0:
            x = builder.call(aten.mul.Tensor, (x, self.scale))
        return builder.call(self.node.target, _moved_args(self.node, x, dict(self.dims)), dict(self.node.kwargs))


@dataclass(frozen=True)
class Factor:
    """A node read at symbols: ``labels[i]`` names axis ``i`` of ``node``.

    ``steps`` are operations still to be applied to the node, pushed below a repeat so that they run
    on the small value. ``linear`` tells whether all of them are (padding with zeros and slicing are).
    """

    node: Node
    labels: tuple[Label, ...]
    steps: tuple[Step, ...] = ()
    linear: bool = True

    def axes(self) -> Label:
        """Return the atomic symbols this factor depends on."""
        return tuple(part for label in self.labels for part in resolve(label))


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
        return [axis for label in self.labels for axis in resolve(label) if axis not in present]


def concrete(size: Any) -> Any:
    """Return a size as a number: for a symbol, the value it had when traced."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else size


def known(size: Any) -> Any:
    """Return a size as a number, if it is one by now: Dynamo may have decided on a symbol."""
    number = size.node.maybe_as_int() if isinstance(size, torch.SymInt) else size
    return size if number is None else number


def place(at: Any, size: Any) -> int | None:
    """Return a position counted from the front; None if it is not known as a number."""
    at, size = known(at), known(size)
    if not isinstance(at, int) or (at < 0 and not isinstance(size, int)):
        return None
    return at + size if at < 0 else at


def value(node: Node) -> torch.Tensor:
    """Return the fake tensor that a graph node carries."""
    return node.meta["val"]


def arg(node: Node, position: int, name: str = "", default: Any = None) -> Any:
    """Return an argument of a call, given by position or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def is_tensor(node: Any) -> bool:
    """Tell whether an argument is a graph node that holds one tensor."""
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)


def same(a: Size, b: Size) -> bool:
    """Tell whether two sizes are equal for certain; never adds a guard."""
    return a == b if isinstance(a, int) and isinstance(b, int) else statically_known_true(a == b)


def leaf(node: Node) -> Product:
    """Read a node as itself, with fresh symbols."""
    labels = tuple(() if same(size, 1) else (Axis(size),) for size in value(node).shape)
    return Product(labels, (Factor(node, labels),))


def unify(a: Label, b: Label) -> bool:
    """Make two labels of equal total size name the same positions; split symbols where needed.

    Returns False, leaving only harmless splits behind, when the sizes do not nest, as in 6 = 2*3
    against 6 = 3*2.
    """
    left, right = list(resolve(a)), list(resolve(b))
    while left and right:
        x, y = left.pop(0), right.pop(0)
        if x is y:
            continue
        if same(x.size, y.size):
            x.redirect(y)
        elif (inner := _quotient(x.size, y.size)) is not None:
            x.redirect(y, rest := Axis(inner))
            left.insert(0, rest)
        elif (inner := _quotient(y.size, x.size)) is not None:
            y.redirect(x, rest := Axis(inner))
            right.insert(0, rest)
        else:
            return False
    return not left and not right


def _quotient(size: Size, outer: Size) -> int | None:
    if isinstance(size, int) and isinstance(outer, int) and outer > 1 and size % outer == 0:
        return size // outer
    return None


def regroup(labels: Sequence[Label], shape: Sequence[Size]) -> tuple[Label, ...] | None:
    """Redistribute symbols over a new shape, as a row-major reshape does; None if they do not fit."""
    flat = [axis for label in labels for axis in resolve(label)]
    if any(not isinstance(size, int) for size in (*shape, *(axis.size for axis in flat))):
        return _regroup_symbolic(flat, list(shape))
    grouped: list[Label] = []
    for size in shape:
        label: list[Axis] = []
        remaining = size
        while remaining != 1:
            if not flat:
                return None
            axis = flat.pop(0)
            if (rest := _quotient(remaining, axis.size)) is not None:
                label.append(axis)
                remaining = rest
            elif (inner := _quotient(axis.size, remaining)) is not None:
                outer, tail = Axis(remaining), Axis(inner)
                axis.redirect(outer, tail)
                label.append(outer)
                flat.insert(0, tail)
                remaining = 1
            else:
                return None
        grouped.append(tuple(label))
    return tuple(grouped) if not flat else None


def _regroup_symbolic(flat: list[Axis], shape: list[Size]) -> tuple[Label, ...] | None:
    """Regroup when sizes are symbols: strip what certainly corresponds, then one split or merge is left.

    A view keeps the number of elements, so when both ends agree, the middles have equal products
    even if no algebra on the symbols shows it.
    """
    ones = [same(size, 1) for size in shape]
    kept = [size for size, one in zip(shape, ones, strict=True) if not one]
    head: list[Label] = []
    while flat and kept and same(flat[0].size, kept[0]):
        head.append((flat.pop(0),))
        kept.pop(0)
    end: list[Label] = []
    while flat and kept and same(flat[-1].size, kept[-1]):
        end.insert(0, (flat.pop(),))
        kept.pop()
    old, new = _trailing_numbers([axis.size for axis in flat]), _trailing_numbers(kept)
    if math.prod(old) == math.prod(new):
        numbers = regroup([tuple(flat[len(flat) - len(old) :])], new)
        if numbers is None:
            return None
        end = [*numbers, *end]
        flat, kept = flat[: len(flat) - len(old)], kept[: len(kept) - len(new)]
    if len(flat) == 1 and kept:
        parts = [Axis(size) for size in kept]
        flat[0].redirect(*parts)
        middle: list[Label] = [(part,) for part in parts]
    elif len(kept) == 1 and flat:
        middle = [tuple(flat)]
    elif not flat and not kept:
        middle = []
    else:
        return None
    merged = iter([*head, *middle, *end])
    return tuple(() if one else next(merged) for one in ones)


def _trailing_numbers(sizes: Sequence[Size]) -> list[int]:
    """Return the longest suffix that holds no symbol."""
    suffix = list(itertools.takewhile(lambda size: isinstance(size, int), reversed(sizes)))
    return suffix[::-1]  # type: ignore[return-value]


def layout(product: Product) -> list[Axis]:
    """Return the atomic symbols of a product's axes, in order."""
    return [axis for label in product.labels for axis in resolve(label)]


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
    """Return the product behind one operation, or None when the node must be taken as it is."""
    if node.op != "call_function" or not is_tensor(node):
        return None
    if any(same(size, 0) for size in value(node).shape):
        return None
    if is_view(node):
        inner = index(arg(node, 0), absorb, top)
        labels = _VIEWS.get(node.target, _keep)(node, inner.labels)
        return None if labels is None else replace(inner, labels=labels)
    if node.target is aten.mul.Tensor:
        return _multiply(node, absorb, top)
    if node.target is aten.neg.default and value(node).is_floating_point():
        inner = index(arg(node, 0), absorb, top)
        return replace(inner, scale=-inner.scale)
    if node.target is aten.sum.dim_IntList and absorb(node):
        return sum_product(node, absorb)
    if node.target in (aten.mm.default, aten.bmm.default) and same(value(arg(node, 0)).shape[-1], 1):
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
    joined = _align(node, left, right) or _align(node, leaf(a), leaf(b))
    if joined is None or len(joined.factors) > MAX_FACTORS or not (top or _is_outer(joined, left, right)):
        return None
    return joined


def _align(node: Node, left: Product, right: Product) -> Product | None:
    """Broadcast two products against each other."""
    rank = len(value(node).shape)
    labels: list[Label] = []
    for position in range(-rank, 0):
        x, y = (p.labels[position] if len(p.labels) >= -position else () for p in (left, right))
        if x and y and not unify(x, y):
            return None
        labels.append(x or y)
    return Product(
        tuple(labels),
        left.factors + right.factors,
        left.scale * right.scale,
        left.bound + right.bound,
        left.through + right.through,
    )


def _is_outer(product: Product, left: Product, right: Product) -> bool:
    """Tell whether a product is larger than each operand, so that a contraction gains by seeing both.

    Otherwise it is an elementwise scaling: better fused into the operand than carried as a factor.
    """
    axes = {axis for label in product.labels for axis in resolve(label)}
    return all(axes - {axis for f in side.factors for axis in f.axes()} for side in (left, right))


def sum_dims(node: Node) -> list[int]:
    """Return the non-negative axes that a sum or mean node reduces."""
    rank = len(value(arg(node, 0)).shape)
    dims = arg(node, 1, "dim") if node.target not in (aten.sum.default, aten.mean.default) else None
    if not dims:
        return list(range(rank))
    return sorted(dim % rank for dim in (dims if isinstance(dims, (list, tuple)) else [dims]))


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


def expand(product: Product) -> Product:
    """Read every factor further, through views, products and contractions, down to what is neither.

    Past `MAX_FACTORS` what is left is taken as it is.
    """
    factors: list[Factor] = []
    scale, bound, through = product.scale, product.bound, product.through
    unread = list(product.factors)
    while unread:
        factor = unread.pop(0)
        full = bool(factor.steps) or len(factors) + len(unread) >= MAX_FACTORS
        inner = None if full else _open(factor.node)
        if inner is None or not all(unify(x, y) for x, y in zip(inner.labels, factor.labels, strict=True)):
            factors.append(factor)
            continue
        unread = [*inner.factors, *unread]
        scale, bound, through = scale * inner.scale, bound + inner.bound, through + inner.through
    return Product(product.labels, tuple(factors), scale, bound, through)


def _open(node: Node) -> Product | None:
    """Read a node as a product of something else; None if it is what it is."""
    if node.target is aten.sum.dim_IntList:
        inner = sum_product(node)
    elif node.target in (aten.mm.default, aten.bmm.default):
        inner = matmul_product(node)
    else:
        inner = index(node)
    return None if inner is None or any(factor.node is node for factor in inner.factors) else inner


def _push_below_repeat(node: Node, absorb: Callable[[Node], bool]) -> Product | None:
    """Read ``op(repeat(x))`` as ``repeat(op(x))`` for unary ``op``, padding and slicing.

    None unless there is a repeat: otherwise nothing is gained over taking the node itself.
    """
    if not (node.args and is_tensor(arg(node, 0))) or any(isinstance(a, Node) for a in node.args[1:]):
        return None
    moved = _resized_axes(node) if node.target in _RESIZING else {} if _is_unary(node) else None
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

    step = Step(node, tuple(dims.items()), scale)
    linear = node.target is aten.slice.Tensor or (
        node.target is aten.constant_pad_nd.default and not any(node.args[2:])
    )
    pushed = Factor(factor.node, rename(factor.labels), (*factor.steps, step), factor.linear and linear)
    return Product(rename(inner.labels), (pushed,), through=inner.through)


def _is_unary(node: Node) -> bool:
    """Tell whether a node maps one tensor elementwise, the same way every time."""
    target: Any = node.target
    tags = getattr(target, "tags", ())
    return (
        (torch.Tag.pointwise in tags or target in _CASTS)
        and torch.Tag.nondeterministic_seeded not in tags
        and not any(isinstance(a, Node) for a in node.kwargs.values())
    )


def _resized_axes(node: Node) -> dict[int, Any]:
    """Return the axes that a pad or slice really touches."""
    rank = len(value(node).shape)
    if node.target is aten.slice.Tensor:
        dim = arg(node, 1, "dim", 0) % rank
        return {dim: None}
    pad = arg(node, 1)
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    return {rank - 1 - i: pair for i, pair in enumerate(pairs) if pair != (0, 0)}


def _moved_args(node: Node, x: Node, dims: dict[int, int]) -> tuple[Any, ...]:
    """Return a node's arguments for a value whose axes sit elsewhere."""
    if node.target is aten.slice.Tensor:
        return (x, next(iter(dims.values())), *node.args[2:])
    if node.target is aten.constant_pad_nd.default:
        rank, pad = len(value(x).shape), [0, 0] * len(value(x).shape)
        for dim, pair in _resized_axes(node).items():
            start = 2 * (rank - 1 - dims[dim])
            pad[start : start + 2] = pair
        return (x, pad, *node.args[2:])
    return (x, *node.args[1:])


_CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)
_RESIZING = {aten.constant_pad_nd.default, aten.slice.Tensor}

# Views: (node, labels of the input) -> labels of the output, or None if they cannot be told.
LabelMap = Callable[[Node, tuple[Label, ...]], tuple[Label, ...] | None]


def _keep(node: Node, labels: tuple[Label, ...]) -> tuple[Label, ...]:
    return labels


def _reshape(node: Node, labels: tuple[Label, ...]) -> tuple[Label, ...] | None:
    return regroup(labels, value(node).shape)


def _permute(node: Node, labels: tuple[Label, ...]) -> tuple[Label, ...]:
    return tuple(labels[dim] for dim in arg(node, 1))


def _transpose(node: Node, labels: tuple[Label, ...]) -> tuple[Label, ...]:
    order = list(labels)
    i, j = arg(node, 1, default=0), arg(node, 2, default=-1)
    order[i], order[j] = order[j], order[i]
    return tuple(order)


def _unsqueeze(node: Node, labels: tuple[Label, ...]) -> tuple[Label, ...]:
    dim = arg(node, 1) % (len(labels) + 1)
    return (*labels[:dim], (), *labels[dim:])


def _squeeze(node: Node, labels: tuple[Label, ...]) -> tuple[Label, ...]:
    rank = len(labels)
    dims = arg(node, 1, "dim", range(rank))
    dropped = {dim % rank for dim in (dims if isinstance(dims, (list, tuple, range)) else [dims])}
    shape = value(arg(node, 0)).shape
    return tuple(label for dim, label in enumerate(labels) if not (dim in dropped and same(shape[dim], 1)))


def _expand(node: Node, labels: tuple[Label, ...]) -> tuple[Label, ...]:
    shape = value(node).shape
    padded = ((),) * (len(shape) - len(labels)) + labels
    return tuple(label or (() if same(size, 1) else (Axis(size),)) for label, size in zip(padded, shape, strict=True))


def _repeat(node: Node, labels: tuple[Label, ...]) -> tuple[Label, ...]:
    """Tile every axis: the copies are a symbol of their own, outside the axis."""
    times = arg(node, 1)
    padded = ((),) * (len(times) - len(labels)) + labels
    copies = [() if same(count, 1) else (Axis(count),) for count in _sizes(times)]
    return tuple((*copy, *label) for copy, label in zip(copies, padded, strict=True))


def _sizes(arguments: Sequence[Any]) -> list[Size]:
    return [entry.meta["val"] if isinstance(entry, Node) else entry for entry in arguments]


_VIEWS: dict[Any, LabelMap] = {
    aten.alias.default: _keep,
    aten.clone.default: _keep,
    aten.detach.default: _keep,
    aten.view.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten.reshape.default: _reshape,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: _transpose,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.expand.default: _expand,
    aten.repeat.default: _repeat,
}


def viewed(node: Node, labels: tuple[Label, ...]) -> tuple[Label, ...] | None:
    """Return the labels of a view, from those of its input; None if they cannot be told."""
    return _VIEWS.get(node.target, _keep)(node, labels)


def is_view(node: Node) -> bool:
    """Tell whether a node only moves symbols between axes (a copy and ``x[:]`` count)."""
    return node.target in _VIEWS or (
        node.target is aten.slice.Tensor
        and all(same(a, b) for a, b in zip(value(node).shape, value(arg(node, 0)).shape, strict=True))
    )
