"""Where the steps of an unrolled loop come together again.

That is in a ``cat`` or ``stack``, in writes next to one another, in a sum over steps, or in the last state.

Shapes. All steps' values are (t, ...), a step's is (...). What joins them puts the time axis where the graph had it:
``cat`` gives (..., t * width, ...), a sum over steps gives (...).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Graph, Node

from ..ir.builder import upstream
from ..ir.fx import SCATTERS, arg, is_erased, is_pointwise, is_tensor, is_zero, same, value
from ..ir.moves import is_whole
from ..ir.rewrite import Rewrite
from ..ir.source import source_line
from .affine import Loop
from .replace import Join, replace
from .reroll import Reroller
from .scatters import content, position
from .vectorize import NotALoop, described

aten = torch.ops.aten

# Shorter loops are ordinary layer code.
SHORTEST = 4
# Shorter chains of equal operations are ordinary layer code, unless their values come together again.
SHORTEST_CHAIN = 8
# How many nodes of a step are looked at for the step before it.
_STEP_NODES = 64
# How many values a step may add to one sum.
_TERMS = 4


def joins(graph: Graph) -> Iterator[tuple[Node, Join]]:
    """Find where the steps of a loop may come together, in graph order."""
    for node in list(graph.nodes):
        if node.op != "call_function" or is_erased(node) or not is_tensor(node):
            continue
        if node.target in (aten.cat.default, aten.stack.default):
            if len(_alike(node.args[0])) >= SHORTEST:
                yield node, _cat
        elif node.target in SCATTERS and not any(_writes_on(user, node) for user in node.users):
            if len(_writes(node)[1]) >= SHORTEST:
                yield node, _written
        elif node.target is aten.add.Tensor and not _is_term(node) and len(_terms(node)) >= SHORTEST:
            yield node, _sum


def _cat(reroller: Reroller, root: Any) -> Node:
    parts, dim = _alike(root.args[0]), arg(root, 1, "dim", 0) % value(root).dim()
    rest, shape = root.args[0][len(parts) :], [*value(root).shape]
    shape[dim] = shape[dim] - sum(value(part).shape[dim] for part in rest)
    whole = _along(reroller, reroller.stack(parts, root), dim, shape)
    return reroller.emit.call(aten.cat.default, [whole, *rest], dim) if rest else whole


def _alike(parts: Sequence[Node]) -> Sequence[Node]:
    """Choose the parts that may be steps of one loop: all, or all but a last one that is of another size; else none."""
    alike = [is_whole(value(part).shape, value(parts[0]).shape) for part in parts]
    steps = parts if len(parts) < 2 or alike[-1] else parts[:-1]
    return steps if all(alike[: len(steps)]) else []


def _along(reroller: Reroller, x: Node, dim: int, shape: Sequence[int]) -> Node:
    """Lay steps (t, ...) one after another along an axis that each of them has, in this shape."""
    order = [d + 1 for d in range(dim)] + [0] + [d + 1 for d in range(dim, value(x).dim() - 1)]
    return reroller.emit.reshape(reroller.emit.permute(x, order), shape)


def _writes_on(user: Node, node: Node) -> bool:
    return user.target in SCATTERS and user.args[0] is node


def _writes(root: Node) -> tuple[Node, list[Node]]:
    """Follow a chain of writes to its start; return that, and the writes, first one first."""
    chain: list[Node] = []
    node: Any = root
    while isinstance(node, Node) and node.target is root.target:
        chain.append(node)
        node = node.args[0]
    return node, chain[::-1]


def _written(reroller: Reroller, root: Node) -> Node:
    base, writes = _writes(root)
    return _place(reroller, root, base, [(write, content(write)) for write in writes])


def _place(reroller: Reroller, root: Node, base: Node, writes: list[tuple[Node, Node]]) -> Node:
    """Write the values of all steps, (t, ...), to neighbouring slices of one axis of ``base`` at once."""
    positions: list[Any] = [position(write) for write, _ in writes]
    first = positions[0]
    if first is None or any(p is None or (p[0], p[2]) != (first[0], first[2]) for p in positions):
        raise NotALoop(
            "write-uneven",
            f"the steps do not all write slices of one width to one axis of {described(base)}",
            writes[0][0],
        )
    dim, _, width = first
    ordered = sorted(zip(positions, writes, strict=True), key=lambda pair: pair[0][1])
    starts = [p[1] for p, _ in ordered]
    if any(b - a != width for a, b in pairwise(starts)):
        raise NotALoop(
            "write-uneven",
            f"the slices that the steps write to axis {dim} of {described(base)} overlap or leave gaps",
            writes[0][0],
        )
    x = reroller.stack([content for _, (_, content) in ordered], root)
    shape = [*value(root).shape]
    shape[dim] = width * len(starts)
    x = reroller.emit.cast(_along(reroller, x, dim, shape), value(root).dtype)
    if same(shape[dim], value(root).shape[dim]):
        return x
    return reroller.emit.call(aten.slice_scatter.default, base, x, dim, starts[0], starts[-1] + width)


def _is_term(node: Any) -> bool:
    """Tell whether a sum is only a part of a longer one."""
    users = list(node.users)
    return len(users) == 1 and users[0].target is aten.add.Tensor and _same_type(users[0], node)


def _same_type(a: Any, b: Any) -> bool:
    x, y = value(a), value(b)
    return not a.kwargs and x.shape == y.shape and x.dtype == y.dtype


def _terms(root: Node) -> list[Node]:
    """List the terms of a chain of additions, first one first; empty if they are not all of one type."""
    terms: list[Node] = []
    stack: list[Any] = [root]
    while stack:
        node = stack.pop()
        if node is root or (node.target is aten.add.Tensor and len(node.users) == 1 and not node.kwargs):
            if not all(is_tensor(x) and _same_type(node, x) for x in node.args):
                if node is root:
                    return []
            else:
                stack += node.args[::-1]
                continue
        terms.append(node)
    return terms


def _is_gradient_of_slice(term: Any) -> bool:
    return term.target in SCATTERS and is_zero(term.args[0])


def _sum(reroller: Reroller, root: Node) -> Node:
    parts: list[Node] = []
    groups: dict[Any, list[Any]] = defaultdict(list)
    seen: dict[object, int] = defaultdict(int)
    for term in _terms(root):
        if _is_gradient_of_slice(term):
            place = (term.target, position(term))
            groups[term.target, seen[place]].append(term)
            seen[place] += 1
        else:
            groups[term.target].append(term)
    for key, terms in groups.items():
        if len(terms) < SHORTEST:
            parts += terms
        elif isinstance(key, tuple):
            parts.append(_place(reroller, root, terms[0].args[0], [(t, t.args[1]) for t in terms]))
        else:
            parts += _sums(reroller, root, terms)
    return reroller.emit.combined(aten.add.Tensor, parts)


def _sums(reroller: Reroller, root: Node, terms: list[Node]) -> list[Node]:
    """Add up terms (...) over time, each step having one or a few; one sum (...) for each of these."""
    reasons: list[NotALoop] = []
    for period in range(1, _TERMS + 1):
        if len(terms) % period or len(terms) // period < SHORTEST:
            continue
        try:
            stacks = [reroller.stack(terms[k::period], root) for k in range(period)]
        except NotALoop as reason:
            reasons.append(reason)
            continue
        return [reroller.emit.call(aten.sum.dim_IntList, x, [0]) for x in stacks]
    raise reasons[0]


def last_states(graph: Graph, reroller: Reroller) -> Iterator[tuple[Node, Join, Node]]:
    """Find last states that are used elsewhere: (root, join, the node after which they are known)."""
    live = upstream(graph.output_node()) if reroller.loops else set()
    for loop in reroller.loops:
        at = 0 if loop.reverse else len(loop.steps) - 1
        node, states = loop.steps[at], loop.states
        if node not in live or states is None:
            continue

        def join(reroller: Reroller, root: Node, loop: Loop = loop, states: Node = states, at: int = at) -> Node:
            reroller.emit.settle()  # what was made may stand after this place
            last = loop.last or reroller.emit.call(aten.select.int, states, 0, at)
            return reroller.emit.call(aten.clone.default, last)

        yield node, join, (loop.last or states).next


def chains(graph: Graph, rerolled: set[Node]) -> Iterator[list[Node]]:
    """Find nodes of one kind and source line, each fed by the one before it, that no loop accounts for; last first."""
    live = upstream(graph.output_node())
    kinds: dict[Any, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if node in live and is_pointwise(node.target) and is_tensor(node) and value(node).is_floating_point():
            kinds[node.target, source_line(node), str(value(node).shape)].append(node)
    order = {node: i for i, node in enumerate(graph.nodes)}
    for nodes in sorted(kinds.values(), key=lambda nodes: -order[nodes[-1]]):
        members = {node for node in nodes if node not in rerolled}
        for end in nodes[::-1]:
            if end not in members or end in rerolled or len(members) < SHORTEST_CHAIN:
                continue
            chain = [end]
            while (before := nearest(chain[-1], members, _STEP_NODES)) is not None:
                chain.append(before)
            members -= set(chain)
            if len(chain) >= SHORTEST_CHAIN:
                yield chain[::-1]


def nearest(node: Node, members: set[Node], within: int) -> Node | None:
    """Return the nearest member that feeds a node, looking at so many nodes before it."""
    seen, queue = {node}, deque([node])
    while queue and len(seen) < within:
        for x in queue.popleft().all_input_nodes:
            if x in members:
                return x
            if x not in seen:
                seen.add(x)
                queue.append(x)
    return None


def replace_end(reroller: Reroller, chain: list[Node]) -> Rewrite | None:
    """Swap the last of a chain of steps, some of whose kind may stand in one step, for the last state of a scan.

    Returns:
        The rewrite; None if the steps are no loop.

    Raises:
        NotALoop: They are no scan.
    """
    end, reasons = chain[-1], list[NotALoop]()
    for period in range(1, _TERMS + 1):
        steps = chain[::-1][::period][::-1]

        def last(reroller: Reroller, root: Node, steps: list[Node] = steps) -> Node:
            return reroller.emit.call(aten.select.int, reroller.stack(steps, root), 0, len(steps) - 1)

        try:
            return replace(reroller, end, last)
        except NotALoop as reason:
            reasons.append(reason)
    raise reasons[0]
