"""Let a scan run in 16 bits, if its inputs were widened from 16 bits and all that it gives becomes 16 bits again.

Reference code widens activations to float32 before a scan and narrows the layer's result. Matrix units multiply 16-bit
numbers several times faster, and the operator sums in float32. So the region from the 16-bit values before the scan to
the one 16-bit value after it is replaced as one. What it loses is of the size of the rounding that the original makes
at its end, and the check of the region decides: at most eight times the original's own error, gradients included.

Shapes are those of the region, and stay; dtypes change.
"""

from __future__ import annotations

from operator import getitem

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from ...ops.torch.registry import OPS, named_args, node_args
from ..ir.builder import Builder, is_constant
from ..ir.fx import arg, is_tensor, value

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type.default

_HALF = (torch.bfloat16, torch.float16)
# How many nodes are looked at: what lies between a scan and the layer's result is short.
MOST = 512


def narrowed_later(y: Node) -> Node | None:
    """Return the one node through which all that depends on a float32 value becomes 16 bits; None if there is none."""
    if value(y).dtype != torch.float32:
        return None
    ends, seen, stack = set[Node](), set[Node](), [y]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if len(seen) > MOST or not is_tensor(node) or len(ends) > 1:
            return None
        if value(node).dtype in _HALF:
            ends.add(node)
        else:
            stack.extend(node.users)
    return ends.pop() if len(ends) == 1 else None


def region(root: Node) -> set[Node] | None:
    """Return the nodes that compute a 16-bit value from 16-bit values; None if they are too many, or one is random."""
    found, stack = set[Node](), [root]
    while stack:
        node = stack.pop()
        outside = node.op != "call_function" or (is_tensor(node) and value(node).dtype == value(root).dtype)
        if node in found or (outside and node is not root):
            continue
        if len(found) > MOST or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return None
        found.add(node)
        stack.extend(node.all_input_nodes)
    return found


def narrowed(build: Builder, root: Node, inside: set[Node], old: Node, new: Node) -> Node | None:
    """Compute a 16-bit value anew, with a scan in 16 bits.

    Args:
        build: Where to.
        root: The 16-bit value.
        inside: What computes it: a `region`, and the nodes between its values and ``new``.
        old: What the scan gave.
        new: The same by ``ssd`` in float32.

    Returns:
        The new value; None if x, B or C of the scan was not widened.
    """
    half = value(root).dtype
    copies: dict[Node, Node] = {}

    def copy(node: Node) -> Node:
        if node is old:
            return copy(new)
        if node not in inside or is_constant(node):
            return node
        if node not in copies:
            args, kwargs = map_arg((node.args, node.kwargs), copy)
            copies[node] = build.call(node.target, args, kwargs)  # type: ignore[arg-type]
        return copies[node]

    def narrow(node: Node) -> Node | None:
        if node.target is convert:
            source: Node = arg(node, 0)
            return source if value(source).dtype == half else None
        moves = getattr(node.target, "is_view", False) or node.target in (aten.clone.default, aten._unsafe_view.default)
        inner = narrow(arg(node, 0)) if moves else None
        if inner is None or node.target is aten.clone.default:
            return inner
        if node.target in (aten.view.default, aten._unsafe_view.default):
            return build.reshape(inner, [[size] for size in value(node).shape])
        return build.call(node.target, (inner, *node.args[1:]), node.kwargs)

    scans = [node for node in inside if node.target is OPS["ssd"]]
    if len(scans) != 1:
        return None
    given = named_args("ssd", scans[0].args)
    parts = {name: narrow(given[name]) for name in ("x", "B", "C")}
    if any(part is None for part in parts.values()):
        return None
    rest = {name: copy(part) if isinstance(part, Node) else part for name, part in given.items() if name not in parts}
    y = build.call(getitem, (build.call(OPS["ssd"], node_args("ssd", **{**rest, **parts})), 0))
    first = next(user for user in scans[0].users if user.target is getitem and user.args[1] == 0)
    copies[first] = build.call(convert, (y, value(first).dtype))
    return build.restride(copy(root), value(root))
