"""Give ``ssd`` the skip connection that is added to its result.

A layer ends its scan with ``y + D * x``, where x is what the scan reads and D has one number per head, or per head and
channel. The operator has an argument for it: its kernels hold x while they compute y, and the backward sums the
gradient of D in its pass over x. Outside of the operator, x is read and y is read and written once more, and the
gradient of D is a sum of its own.

The skip is read in index notation. It is one only if its factors are those of the operator's x at the same symbols,
and others that depend on heads and channels alone. Zeros after the last token, which fill the last chunk of x and of
y, change nothing. A scan in 16 bits, in a layer that is widened to float32, gets D in float32; then the region ends
where the layer becomes 16 bits again.

Shapes. x and y are (b, t, h, p), D is (h,) or (h, p). Source: D as in Gu & Dao 2023 (arXiv:2312.00752), algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import isfinite
from operator import getitem

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ..ir.builder import Builder, between, sort_topologically, upstream
from ..ir.contract import Operand, lay_out, multiplied
from ..ir.fx import CONVERT, HALF, SUMS, arg, factor_of_second, is_random, is_tensor, is_training, value
from ..ir.index import Factor, Product, expand, index, padding, read_further
from ..ir.operators import HEADS
from ..ir.rewrite import Rewrite, replace_node
from ..ir.symbols import Axis, Label, atoms, extent, resolve
from ..ir.views import is_view, viewed
from ..recurrence.chunked_form import before_padding, length_before_padding, with_label
from ..recurrence.narrowing import narrowed_later
from ..recurrence.segment_sums import unify_all

aten = torch.ops.aten


def absorb_skips(graph: Graph, wanted: Callable[[str], bool]) -> Iterator[Rewrite]:
    """Replace ``ssd(x, ...) + D * x`` by ``ssd(x, ..., D=D)``."""
    if is_training(graph):
        return
    for scan in graph.find_nodes(op="call_function", target=HEADS.target):
        given = HEADS.given(scan.args)
        ys, states = ([user for user in scan.users if user.args[1] == i] for i in (0, 1))
        if given["D"] is not None or given["z"] is not None or len(ys) != 1:
            continue
        if states and torch.is_grad_enabled():
            continue  # the state may be read before D is there
        skip = _read(ys[0], given["x"])
        if skip is None or any(scan in upstream(factor.node) for factor in skip.factors):
            continue
        rewrite = _absorb(scan, skip, states, wanted)
        if rewrite is not None:
            yield rewrite
            sort_topologically(graph)
            graph.eliminate_dead_code()


@dataclass
class _Skip:
    """``y + D * x``, found after an operator.

    Attributes:
        sum: The node that holds it.
        labels: Those of the operator's result, and of the summand that it becomes.
        filled: The symbols of time with zeros after the last token, as the summand has it, and without; None if it has
            none.
        factors: Those of D, at symbols of heads and channels.
        scale: That of D.
        through: The nodes that compute the other summand from its factors.
        shared: The nodes that compute the operator's x from its factors.
    """

    sum: Node
    labels: tuple[tuple[Label, ...], tuple[Label, ...]]
    filled: tuple[Label, Label] | None
    factors: list[Factor]
    scale: float
    through: tuple[Node, ...]
    shared: tuple[Node, ...]


def _read(y: Node, x: Node) -> _Skip | None:
    """Read the skip that is added to a result y of ``ssd``, whose argument is x; None if there is none."""
    if not all(isinstance(size, int) and size for size in value(x).shape):
        return None
    given = index(x, top=False)
    found = _followed(y, given.labels)
    if found is None:
        return None
    last, labels, filled = found
    (end,) = last.users
    other, sign = _summand(end, last)
    if other is None or value(other).shape != value(last).shape or value(other).dtype != value(last).dtype:
        return None
    product = index(other)
    if not (_read_once(other) and unify_all(product.labels, labels)):
        return None
    product, given = _opened(product, filled), _opened(given, filled)
    if any(node.target is aten.detach.default for node in (*product.through, *given.through)):
        return None  # a gradient would flow where there is none
    rest = list(product.factors)
    for factor in given.factors:
        same = next((x for x in rest if x.identity == factor.identity), None)
        if same is None:
            return None
        rest = [x for x in rest if x is not same]
    own = {*atoms(given.labels[2:])}
    if not all(set(factor.axes()) <= own for factor in rest):
        return None
    if not given.scale or not isfinite(scale := sign * product.scale / given.scale):
        return None
    return _Skip(end, (given.labels, labels), filled, rest, scale, product.through, given.through)


def _followed(y: Node, labels: tuple[Label, ...]) -> tuple[Node, tuple[Label, ...], tuple[Label, Label] | None] | None:
    """Follow a result through what only moves it to a summand, as long as it has one reader.

    Returns:
        The summand, its labels, and the symbols of time (with zeros after the last token, and without) if it has zeros
        there; None if it is not added to anything.
    """
    filled: tuple[Label, Label] | None = None
    while len(y.users) == 1:
        (user,) = y.users
        if user.target in SUMS:
            return y, labels, filled
        moved: tuple[Label, ...] | None = None
        if is_view(user) and user.target is not aten.detach.default:
            moved = viewed(user, labels)
        elif user.target is CONVERT and _widens(user):
            moved = labels
        elif user.target is aten.constant_pad_nd.default and filled is None and not any(user.args[2:]):
            for dim, (before, after) in padding(user).items() if len(padding(user)) == 1 else ():
                if before == 0 and after > 0:
                    filled = ((Axis(value(user).shape[dim]),), labels[dim])
                    moved = with_label(labels, dim, filled[0])
        elif user.target is aten.slice.Tensor and filled is not None:
            dim = arg(user, 1, "dim", 0) % value(user).dim()
            whole = resolve(labels[dim]) == resolve(filled[0]) and value(user).shape[dim] == extent(filled[1])
            if whole and arg(user, 2, "start") in (0, None) and arg(user, 4, "step", 1) == 1:
                moved, filled = with_label(labels, dim, filled[1]), None
        if moved is None:
            return None
        y, labels = user, moved
    return None


def _summand(end: Node, y: Node) -> tuple[Node | None, float]:
    """Read the term that is added to y, and its scale."""
    a, b, factor = arg(end, 0), arg(end, 1), factor_of_second(end)
    if a is y and is_tensor(b) and b is not y:
        return b, factor
    if b is y and is_tensor(a) and factor == 1:
        return a, 1.0
    return None, 0.0


def _read_once(node: Node) -> bool:
    """Tell whether a product, and each view of it, has one reader."""
    while len(node.users) == 1:
        if not is_view(node):
            return True
        node = arg(node, 0)
    return False


def _opened(product: Product, filled: tuple[Label, Label] | None) -> Product:
    """Read all factors down to what is no product, without zeros after the last token."""
    product = expand(product, _inner)
    if filled is None:
        return product
    time, short = resolve(filled[0]), filled[1]
    full = [factor for factor in product.factors if length_before_padding(factor, time) == extent(short)]
    factors = tuple(before_padding(factor, time, short) if factor in full else factor for factor in product.factors)
    through = (*product.through, *(factor.node for factor in full if not factor.pending))
    return expand(replace(product, factors=factors, through=through), _inner)


def _inner(node: Node) -> Product | None:
    """Read a node as a product of something else, or as what it was before it was widened; None if it is neither."""
    if node.target is CONVERT and _widens(node):
        narrow = index(arg(node, 0))
        return replace(narrow, through=(*narrow.through, node))
    return read_further(node, sums=False)


def _widens(node: Node) -> bool:
    return value(node).dtype == torch.float32 and value(arg(node, 0)).dtype in HALF


def _absorb(scan: Node, skip: _Skip, states: list[Node], wanted: Callable[[str], bool]) -> Rewrite | None:
    """Emit the operator with D, and replace the sum, or the 16-bit value that it becomes."""
    y = next(user for user in scan.users if user.args[1] == 0)
    root = skip.sum if value(skip.sum).dtype == value(y).dtype else narrowed_later(skip.sum)
    if root is None or not wanted(root.name):
        return None
    inside = between(root, [skip.sum])
    after = [node for node in scan.graph.nodes if node is root or node in inside] if root is not skip.sum else []
    if any(is_random(node.target) for node in after):
        return None
    build = Builder(root)
    given = {**HEADS.given(scan.args), "D": _laid(build, skip)}
    result = build.call(scan.target, *given.values(), *scan.args[len(given) :])
    new = _laid_as_summand(build, build.call(getitem, result, 0), skip)
    copies = {skip.sum: new}
    for node in after:
        args, kwargs = map_arg((node.args, node.kwargs), lambda x: copies.get(x, x))
        copies[node] = build.call(node.target, *args, **kwargs)  # type: ignore[arg-type]
    for state in states:
        state.replace_all_uses_with(build.call(getitem, result, 1))
    tokens = value(y).shape[1]
    return replace_node(
        root,
        build.restride(copies[root], value(root)),
        inside=(*skip.through, *skip.shared),
        added=(*build.added, *skip.shared),
        name="absorb skip",
        why="x is read again to add D * x, and the gradient of D is a sum of its own",
        detail=f"D of {' x '.join(map(str, value(given['D']).shape))} as an argument of {HEADS.name}",
        multilinear=False,
        terms=tokens,
        timed_alone=False,  # it pays in the backward
        spread=0.1,
    )


def _laid(build: Builder, skip: _Skip) -> Node:
    """Lay D out per head, or per head and channel."""
    heads, channels = skip.labels[0][2:]
    read = {axis for factor in skip.factors for axis in factor.axes()}
    groups = (heads, channels) if read & set(resolve(channels)) else (heads,)
    if not skip.factors:
        return build.full(skip.scale, skip.sum, [extent(group) for group in groups])
    order = [*resolve(heads), *resolve(channels)]
    D = multiplied(build, skip.factors, order)
    node = build.cast(lay_out(build, D, Product(groups, ())), value(skip.sum).dtype)
    return build.dense(build.times(node, skip.scale))


def _laid_as_summand(build: Builder, y: Node, skip: _Skip) -> Node:
    """Lay a result of the operator out as the sum is."""
    own, labels = skip.labels
    if skip.filled is not None:
        long, short = skip.filled
        dim = [resolve(label) for label in own].index(resolve(short))
        missing = [0, 0] * (len(own) - 1 - dim) + [0, extent(long) - extent(short)]
        y, own = build.call(aten.constant_pad_nd.default, y, missing), with_label(own, dim, long)
    axes = list(atoms(own))
    y = lay_out(build, Operand(build.reshape(y, [axis.size for axis in axes]), axes), Product(labels, ()))
    return build.restride(build.cast(y, value(skip.sum).dtype), value(skip.sum))
