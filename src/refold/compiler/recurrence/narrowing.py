"""Let a scan run in 16 bits, if its inputs were widened from 16 bits and all that it gives becomes 16 bits again.

Reference code widens activations to float32 before a scan and narrows the layer's result. Matrix units multiply 16-bit
numbers several times faster, and the operator sums in float32. So the region from the 16-bit values before the scan to
the one 16-bit value after it is replaced as one. The loss is about as large as the rounding that the original makes at
its end. The check of the region decides: the error, with gradients, may be at most eight times the original's own
error.

Shapes are those of the region, and stay; dtypes change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from operator import getitem
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from ...ops.spec import all_specs
from ...ops.torch.registry import RUNNERS, Operation
from ..ir.builder import Builder, is_constant, walk
from ..ir.fx import CONVERT, HALF, VIEWS, arg, is_random, is_tensor, value
from ..ir.index import index
from ..ir.rewrite import Rewrite, replace_node
from ..ir.symbols import resolve

aten = torch.ops.aten

NARROWED = {scan.target: scan for scan in map(Operation, all_specs()) if scan.spec.narrowed is not None}
"""The scans that can have 16-bit arguments."""
# How many nodes are looked at: what lies between a scan and the layer's result is short.
MOST = 512


def narrowed_later(y: Node) -> Node | None:
    """Return the one node through which all that depends on a float32 value becomes 16 bits; None if there is none."""
    if value(y).dtype != torch.float32:
        return None
    ends = set[Node]()
    for count, node in enumerate(walk([y], lambda x: () if x in ends else x.users)):
        if count == MOST or not is_tensor(node) or len(ends) > 1:
            return None
        if value(node).dtype in HALF:
            ends.add(node)
    return ends.pop() if len(ends) == 1 else None


def region(root: Node) -> set[Node] | None:
    """Return the nodes that compute a 16-bit value from 16-bit values; None if they are too many, or one is random."""

    def inside(x: Node) -> bool:
        return x.op == "call_function" and not (is_tensor(x) and value(x).dtype == value(root).dtype)

    found = set[Node]()
    for node in walk([root], lambda x: filter(inside, x.all_input_nodes)):
        if len(found) > MOST or is_random(node.target):
            return None
        found.add(node)
    return found


def narrow_after(
    old: Node, new: Node, made: Collection[Node], wanted: Callable[[str], bool], *, name: str, why: str, detail: str,
    terms: int,
) -> Rewrite | None:  # fmt: skip
    """Replace the 16-bit value that a widened scan becomes, with a scan in 16 bits; None if there is none.

    Args:
        old: What the scan gave.
        new: The same by an operator in float32; it may be ``old``.
        made: The nodes that compute ``new``.
        wanted: Which values may be replaced.
        name: As of `Rewrite`, likewise why, detail, to which the dtype is added, and terms.
        why: See name.
        detail: See name.
        terms: See name.
    """
    end = narrowed_later(old)
    inside = None if end is None or not wanted(end.name) else region(end)
    if end is None or inside is None or old not in inside:
        return None
    build = Builder(end)
    found = narrowed(build, end, inside | set(made), old, new)
    if found is None:
        build.undo()
        return None
    detail = f"{detail} in {str(value(end).dtype).removeprefix('torch.')}"
    return replace_node(
        end, found, inside=inside, added=build.added, name=name, why=why, detail=detail, multilinear=False, terms=terms,
        spread=0.1, rounds_more=True,
    )  # fmt: skip


def narrowed(build: Builder, root: Node, inside: set[Node], old: Node, new: Node) -> Node | None:
    """Compute a 16-bit value anew, with a scan in 16 bits.

    Args:
        build: Where to.
        root: The 16-bit value.
        inside: What computes it: a `region`, and the nodes between its values and ``new``.
        old: What the scan gave.
        new: The same by an operator in float32; it may be ``old``.

    Returns:
        The new value; None if what the operator must have in 16 bits was not widened, or if in 16 bits another
        backend would run.
    """
    half = value(root).dtype
    copies: dict[Node, Node] = {}

    def copy(node: Node) -> Node:
        if node in copies:
            return copies[node]
        if node is old is not new:
            return copy(new)
        if node not in inside or is_constant(node):
            return node
        given: Any = map_arg((node.args, node.kwargs), copy if _moves(node) else wide)
        same = node.target is CONVERT and value(given[0][0]).dtype == value(node).dtype
        copies[node] = given[0][0] if same else build.call(node.target, *given[0], **given[1])
        return copies[node]

    def wide(node: Node) -> Node:
        """Return the copy of a node in the dtype that the node has."""
        new = copy(node)
        changed = is_tensor(new) and value(new).dtype != value(node).dtype
        return build.call(CONVERT, new, value(node).dtype) if changed else new

    def narrow(node: Any) -> Node | None:
        if not is_tensor(node):
            return None
        if node.target is CONVERT:
            source: Node = arg(node, 0)
            return source if value(source).dtype == half else None
        if node.target is aten.div.Tensor and half == torch.bfloat16 and narrow(arg(node, 0)) is not None:
            return build.call(CONVERT, copy(node), half)  # by a log decay, which the operator multiplies by
        if node.target is aten.where.self:  # a choice rounds nothing
            sides = [narrow(x) for x in node.args[1:]]
            return None if None in sides else build.call(node.target, copy(arg(node, 0)), *sides)
        inner = narrow(arg(node, 0)) if _moves(node) else None
        if inner is None or node.target is aten.clone.default:
            return inner
        if node.target in VIEWS:
            return build.reshape(inner, list(value(node).shape))
        return build.call(node.target, inner, *node.args[1:], **node.kwargs)

    scans = [node for node in inside if node.target in NARROWED]
    if len(scans) != 1:
        return None
    (scan,) = scans
    operation = NARROWED[scan.target]
    given, (must, may) = operation.given(scan.args), operation.spec.narrowed or ((), ())
    parts = {key: part for key in (*must, *may) if (part := narrow(given[key])) is not None}
    if not parts.keys() >= set(must):
        return None
    rest = {key: copy(part) if isinstance(part, Node) else part for key, part in given.items() if key not in parts}
    args = operation.args(**rest, **parts)
    if _backend(operation.name, args) is not _backend(operation.name, scan.args):
        return None
    y = build.call(getitem, build.call(scan.target, *args), 0)
    first = next(user for user in scan.users if user.target is getitem and user.args[1] == 0)
    copies[first] = y
    found = copy(root)
    return build.restride(y if _is_same(found, y) else found, value(root))


def _moves(node: Node) -> bool:
    """Tell whether a node moves or copies the elements of a tensor, or converts them."""
    return getattr(node.target, "is_view", False) or node.target in (
        aten.clone.default, aten._unsafe_view.default, CONVERT,
    )  # fmt: skip


def _is_same(node: Node, source: Node) -> bool:
    """Tell whether a node has the elements of another one in the same places, after any views and copies."""
    read = index(node)
    if [factor.node for factor in read.factors] != [source] or read.scale != 1.0:
        return False
    return [*map(resolve, read.labels)] == [*map(resolve, read.factors[0].labels)]


def _backend(name: str, args: Sequence[Any]) -> Any:
    """Choose the backend that would run a node of an operator."""
    runner = RUNNERS[name]
    fakes: list[Any] = [value(x) if isinstance(x, Node) else tuple(x) if isinstance(x, list) else x for x in args]
    arrays = len(runner.spec.args)
    return runner.module(fakes[:arrays], fakes[arrays:-1], fakes[-1])
