"""Turn unrolled loops over time into scans.

A loop shows where its steps come together again: in a ``cat`` of one value a step, in a tensor that
each step writes a slice of, in a sum over steps (gradients of what all steps read), or in its last
state. From there `refold.compiler.rollup` works backwards. What carries no state from step to step
is left to Inductor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph, Node

from ...ops.library import OPS
from ..affine import Loop
from ..duality import lower, reading
from ..graph import Builder, region_inputs
from ..index import arg, is_tensor, same, value
from ..rewrite import Rewrite, replace_node
from ..rollup import Rollup
from ..timewise import NotALoop

aten = torch.ops.aten

# Shorter loops are ordinary layer code.
SHORTEST = 4
_SCATTERS = (aten.select_scatter.default, aten.slice_scatter.default)
SCANS = {OPS[name] for name in ("linear_scan", "selective_scan", "ssd")}
# How many values a step may add to one sum.
_TERMS = 4

Join = Callable[[Rollup, Node], Node]


def roll_up_loops(graph: Graph, wanted: Callable[[str], bool]) -> Iterator[Rewrite]:
    """Replace loops whose carry enters affinely and elementwise by ``linear_scan``."""
    if len(graph.nodes) < 2 * SHORTEST:
        return
    _forward_writes(graph)
    rollup, changed = Rollup(), False
    # A backward needs the states, so forward and backward are scans that share them.
    rollup.training = any(str(n.target).startswith("tangents") for n in graph.find_nodes(op="placeholder"))
    for root, join in _joins(graph):
        if not wanted(root.name):
            continue
        try:
            rewrite = _replace(rollup, root, join)
        except NotALoop:
            continue
        if rewrite is not None:
            changed = True
            yield rewrite
    for root, join, after in _last_states(graph, rollup):
        if wanted(root.name) and (rewrite := _replace(rollup, root, join, after)) is not None:
            yield rewrite
            stable_topological_sort(graph)
    for node in reversed(rollup.emit.added):
        if not node.users and node.graph is graph and not node._erased:
            graph.erase_node(node)
    if changed:
        graph.eliminate_dead_code()


def refusals(graph: Graph) -> list[str]:
    """Say of each list of steps why it is no scan; inserts dead nodes and removes them again."""
    reasons: dict[str, None] = {}
    rollup = Rollup()
    _forward_writes(graph)
    for root, join in list(_joins(graph)):
        try:
            rollup.emit.at(root)
            join(rollup, root)
        except NotALoop as reason:
            reasons[str(reason)] = None
    for node in reversed(rollup.emit.added):
        graph.erase_node(node)
    return list(reasons)


def _replace(rollup: Rollup, root: Node, join: Join, anchor: Node | None = None) -> Rewrite | None:
    """Swap a root for its value over all steps; None if no loop is behind it."""
    loops = len(rollup.loops)
    anchor = anchor or root
    rollup.emit.at(anchor)
    new = join(rollup, root)
    if not _scans(new):
        return None
    operators = ["linear_scan"]
    if not rollup.training:
        operators = [_dualise(rollup, loop, new) for loop in rollup.loops[loops:]] or operators
    build = Builder(anchor)
    new = build.restride(new, value(root))
    rollup.emit.added += build.added
    live = _behind(new)
    added = [node for node in rollup.emit.added if node in live]
    inside = _region(root, added, rollup)
    found = rollup.loops[loops:] or rollup.loops[-1:]
    first = found[0]
    state = " x ".join(str(size) for size in value(first.steps[0]).shape)
    return replace_node(
        root,
        new,
        inside=inside,
        added=added,
        name="roll up loop",
        why="its steps wait for one another, one launch after the other",
        detail=f"{len(first.steps)} steps of a state of {state or 1} as one {operators[0]}"
        + (", against time" if first.reverse else ""),
        multilinear=False,
        terms=len(first.steps),
        spread=0.1,
    )


def _region(root: Node, made: list[Node], rollup: Rollup) -> set[Node]:
    """Return the nodes of the original between what the new value reads and the root."""
    added = set(made)
    read = {x for node in added for x in node.all_input_nodes if x not in added}
    inside = rollup.members - read
    # The operators' arguments may be read from further up than the loop did, behind a negation say.
    behind: set[Node] = set()
    for node in root.graph.nodes:
        if any(x in read or x in behind for x in node.all_input_nodes):
            behind.add(node)
    stack = [x for x in region_inputs(root, inside) if x in behind and x not in read]
    while stack:
        node = stack.pop()
        if node not in inside and node not in added:
            inside.add(node)
            stack.extend(x for x in node.all_input_nodes if x in behind and x not in read)
    return inside


def _dualise(rollup: Rollup, loop: Loop, new: Node) -> str:
    """Replace a scan whose states are only contracted by an operator that never writes them; return its name."""
    scan, body = loop.scan, loop.body
    if loop.reverse or scan is None or body is None:
        return "linear_scan"
    live = _behind(new)
    shape = [len(loop.steps), *value(loop.steps[0]).shape]
    for node in [n for n in live if n.target in (aten.sum.dim_IntList, aten.bmm.default)]:
        read = reading(node, scan, len(shape))
        if read is None or len(shape) < 3 or node is new:
            continue
        initial = loop.initial if isinstance(loop.initial, Node) else None
        if initial is not None and initial.target is aten.full.default and initial.args[1] == 0:
            initial = None
        elif initial is not None:
            initial = rollup.emit.expand(initial, shape[1:])
        elif loop.initial != 0:
            continue
        found = lower(rollup.emit, read, body.scale, body.offset, shape, initial)
        if found is None:
            continue
        y, last = found
        if value(y).shape != value(node).shape:
            continue
        node.replace_all_uses_with(y)
        rollup.emit.settle()
        if scan in _behind(new):  # its states are used otherwise, too
            y.replace_all_uses_with(node)
            continue
        loop.last = rollup.emit.cast(last, value(loop.steps[0]).dtype)
        stable_topological_sort(new.graph)
        return "ssd" if any(n.target is OPS["ssd"] for n in _behind(y)) else "selective_scan"
    return "linear_scan"


def _behind(node: Node) -> set[Node]:
    """Return all that a node depends on."""
    stack = [node]
    seen: set[Node] = set()
    while stack:
        x = stack.pop()
        if x not in seen:
            seen.add(x)
            stack.extend(x.all_input_nodes)
    return seen


def _scans(new: Node) -> bool:
    """Tell whether a value comes out of a scan."""
    return any(node.target in SCANS for node in _behind(new))


def _joins(graph: Graph) -> Iterator[tuple[Node, Join]]:
    """Find where the steps of a loop may come together, in graph order."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node._erased or not is_tensor(node):
            continue
        if node.target in (aten.cat.default, aten.stack.default) and len(node.args[0]) >= SHORTEST:
            yield node, _cat
        elif node.target in _SCATTERS and not any(_writes_on(user, node) for user in node.users):
            if len(_writes(node)[1]) >= SHORTEST:
                yield node, _written
        elif node.target is aten.add.Tensor and not _is_term(node) and len(_terms(node)) >= SHORTEST:
            yield node, _sum


def _cat(rollup: Rollup, root: Any) -> Node:
    parts, dim = root.args[0], arg(root, 1, "dim", 0)
    return _along(rollup, rollup.stack(parts, root), dim % value(root).dim(), value(root).shape)


def _along(rollup: Rollup, x: Node, dim: int, shape: Sequence[int]) -> Node:
    """Lay steps one after another along an axis that each of them has."""
    order = [d + 1 for d in range(dim)] + [0] + [d + 1 for d in range(dim, value(x).dim() - 1)]
    return rollup.emit.reshape(rollup.emit.permute(x, order), shape)


# Writes into a tensor ------------------------------------------------------------------------


def _writes_on(user: Node, node: Node) -> bool:
    return user.target in _SCATTERS and user.args[0] is node


def _content(scatter: Any) -> Any:
    """Return what a write stores, without the copy that functionalisation makes of it."""
    new = scatter.args[1]
    while isinstance(new, Node) and new.target is aten.copy.default:
        source: Any = new.args[1]
        if not is_tensor(source) or value(source).shape != value(new).shape or value(source).dtype != value(new).dtype:
            break
        new = source
    return new


def _position(scatter: Any) -> tuple[int, int, int] | None:
    """Return (axis, start, width) of a write."""
    shape, dim = value(scatter).shape, arg(scatter, 2, "dim", 0) % value(scatter).dim()
    start = arg(scatter, 3, "index" if scatter.target is aten.select_scatter.default else "start", 0) or 0
    if not isinstance(start, int) or arg(scatter, 5, "step", 1) != 1:
        return None
    start = start % shape[dim] if start < 0 else start
    width = 1 if scatter.target is aten.select_scatter.default else value(scatter.args[1]).shape[dim]
    return dim, start, width


def _writes(root: Node) -> tuple[Node, list[Node]]:
    """Return what a chain of writes starts from, and the writes, first one first."""
    chain: list[Node] = []
    node: Any = root
    while isinstance(node, Node) and node.target is root.target:
        chain.append(node)
        node = node.args[0]
    return node, chain[::-1]


def _written(rollup: Rollup, root: Node) -> Node:
    base, writes = _writes(root)
    return _place(rollup, root, base, [(write, _content(write)) for write in writes])


def _place(rollup: Rollup, root: Node, base: Node, writes: list[tuple[Node, Node]]) -> Node:
    """Write the values of all steps at once."""
    positions: list[Any] = [_position(write) for write, _ in writes]
    first = positions[0]
    if first is None or any(p is None or (p[0], p[2]) != (first[0], first[2]) for p in positions):
        raise NotALoop("the steps write to different axes")
    dim, _, width = first
    ordered = sorted(zip(positions, writes, strict=True), key=lambda pair: pair[0][1])
    starts = [p[1] for p, _ in ordered]
    if any(b - a != width for a, b in pairwise(starts)):
        raise NotALoop("the steps do not write next to one another")
    x = rollup.stack([content for _, (_, content) in ordered], root)
    shape = [*value(root).shape]
    shape[dim] = width * len(starts)
    x = rollup.emit.cast(_along(rollup, x, dim, shape), value(root).dtype)
    if same(shape[dim], value(root).shape[dim]):
        return x
    return rollup.emit.call(aten.slice_scatter.default, base, x, dim, starts[0], starts[-1] + width)


def _forward_writes(graph: Graph) -> None:
    """Let a step that reads the slice that was just written read the written value itself."""
    for node in graph.find_nodes(op="call_function", target=aten.select.int):
        write = node.args[0]
        if write.target is not aten.select_scatter.default or not isinstance(arg(node, 2), int):
            continue
        rank, size = value(write).dim(), value(write).shape
        dim = node.args[1] % rank
        if _position(write) != (dim, node.args[2] % size[dim], 1):
            continue
        content = _content(write)
        if value(content).shape == value(node).shape and value(content).dtype == value(node).dtype:
            node.replace_all_uses_with(content)


# Sums over steps -----------------------------------------------------------------------------


def _is_term(node: Any) -> bool:
    """Tell whether a sum is only a part of a longer one."""
    users = list(node.users)
    return len(users) == 1 and users[0].target is aten.add.Tensor and _same_type(users[0], node)


def _same_type(a: Any, b: Any) -> bool:
    x, y = value(a), value(b)
    return not a.kwargs and x.shape == y.shape and x.dtype == y.dtype


def _terms(root: Node) -> list[Node]:
    """Return what a chain of additions adds up, first one first; empty if it is not all of one type."""
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
    base = term.args[0] if term.target in _SCATTERS else None
    return isinstance(base, Node) and base.target is aten.full.default and bool(base.args[1] == 0)


def _sum(rollup: Rollup, root: Node) -> Node:
    parts: list[Node] = []
    groups: dict[Any, list[Any]] = defaultdict(list)
    seen: dict[object, int] = defaultdict(int)
    for term in _terms(root):
        if _is_gradient_of_slice(term):
            place = (term.target, _position(term))
            groups[term.target, seen[place]].append(term)
            seen[place] += 1
        else:
            groups[term.target].append(term)
    for key, terms in groups.items():
        if len(terms) < SHORTEST:
            parts += terms
        elif isinstance(key, tuple):
            parts.append(_place(rollup, root, terms[0].args[0], [(t, t.args[1]) for t in terms]))
        else:
            parts += _sums(rollup, root, terms)
    total = parts[0]
    for part in parts[1:]:
        total = rollup.emit.call(aten.add.Tensor, total, part)
    return total


def _sums(rollup: Rollup, root: Node, terms: list[Node]) -> list[Node]:
    """Add up terms over time, each step having one or a few."""
    for period in range(1, _TERMS + 1):
        if len(terms) % period or len(terms) // period < SHORTEST:
            continue
        try:
            stacks = [rollup.stack(terms[k::period], root) for k in range(period)]
        except NotALoop:
            if period == _TERMS:
                raise
            continue
        return [rollup.emit.call(aten.sum.dim_IntList, x, [0]) for x in stacks]
    raise NotALoop("the terms of a sum are not the same for each step")


# States that are used outside ----------------------------------------------------------------


def _last_states(graph: Graph, rollup: Rollup) -> Iterator[tuple[Node, Join, Node]]:
    live = _behind(graph.output_node()) if rollup.loops else set()
    for loop in rollup.loops:
        at = 0 if loop.reverse else len(loop.steps) - 1
        node, states = loop.steps[at], loop.states
        if node not in live or states is None:
            continue

        def join(rollup: Rollup, root: Node, loop: Loop = loop, states: Node = states, at: int = at) -> Node:
            last = loop.last or rollup.emit.call(aten.select.int, states, 0, at)
            return rollup.emit.call(aten.clone.default, last)

        yield node, join, (loop.last or states).next
