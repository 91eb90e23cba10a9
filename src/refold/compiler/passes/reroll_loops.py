"""Turn unrolled loops over time into scans.

A loop shows where its steps come together again: in a ``cat`` of one value a step, in a tensor that
each step writes a slice of, in a sum over steps (gradients of what all steps read), or in its last
state. From there `refold.compiler.recurrence.reroll` works backwards. What carries no state from step to step
is left to Inductor.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ...ops.torch.registry import OPS
from ..ir.builder import Builder, downstream, region_inputs, sort_topologically, upstream
from ..ir.index import arg, concrete, is_tensor, is_view, same, value
from ..ir.metadata import refresh
from ..ir.rewrite import Rewrite, replace_node, source_line
from ..recurrence.affine import Carries, Loop
from ..recurrence.duality import lower
from ..recurrence.readout import States, reading
from ..recurrence.reroll import Rollup
from ..recurrence.scatters import content, forward_writes, position
from ..recurrence.vectorize import NotALoop, is_pointwise

aten = torch.ops.aten

# Shorter loops are ordinary layer code.
SHORTEST = 4
_SCATTERS = (aten.select_scatter.default, aten.slice_scatter.default)
SCANS = {OPS[name] for name in ("linear_scan", "selective_scan", "ssd")}
_CONTRACTIONS = (aten.sum.dim_IntList, aten.bmm.default)
# Shorter chains of equal operations are ordinary layer code, unless their values come together again.
SHORTEST_CHAIN = 8
# How many nodes of a step are looked at for the step before it.
_STEP_NODES = 64
# How many values a step may add to one sum.
_TERMS = 4

Join = Callable[[Rollup, Node], Node]

WHY = "its steps wait for one another, one launch after the other"


def roll_up_loops(graph: Graph, wanted: Callable[[str], bool]) -> Iterator[Rewrite]:
    """Replace loops whose carry enters affinely and elementwise by ``linear_scan``."""
    if len(graph.nodes) < 2 * SHORTEST:
        return
    forward_writes(graph)
    # A backward needs the states, so forward and backward are scans that share them.
    training = is_training(graph)
    rollup, changed = Rollup(training), False
    for root, join in _joins(graph):
        if not wanted(root.name):
            continue
        try:
            rewrite = replace_reader(rollup, root, join, wanted) or replace(rollup, root, join)
        except NotALoop:
            continue
        if rewrite is not None:
            changed = True
            yield rewrite
    for root, join, after in _last_states(graph, rollup):
        if wanted(root.name) and (rewrite := replace(rollup, root, join, after)) is not None:
            yield rewrite
            sort_topologically(graph)
    rollups = [rollup]
    for steps in _chains(graph, rollup.members):
        if wanted(steps[-1].name):
            rollups.append(Rollup(training))  # of its own: what the others made may stand after this end
            if (rewrite := _replace_end(rollups[-1], steps)) is not None:
                rollup.members |= rollups[-1].members
                changed = True
                yield rewrite
    for node in (node for each in rollups for node in reversed(each.emit.added)):
        if not node.users and node.graph is graph and not node._erased:
            graph.erase_node(node)
    if changed:
        graph.eliminate_dead_code()


def is_training(graph: Graph) -> bool:
    """Tell whether a graph holds a backward."""
    return any(str(n.target).startswith("tangents") for n in graph.find_nodes(op="placeholder"))


def refusals(graph: Graph) -> list[str]:
    """Say of each list of steps why it is no scan; inserts dead nodes and removes them again."""
    reasons: dict[str, None] = {}
    rollup = Rollup()
    forward_writes(graph)
    joins = [(root, partial(join, rollup, root)) for root, join in _joins(graph)]
    ends = [(steps[-1], partial(rollup.stack, steps, steps[-1])) for steps in _chains(graph, rollup.members)]
    for root, attempt in joins + ends:
        try:
            rollup.emit.at(root)
            attempt()
        except NotALoop as reason:
            reasons[str(reason)] = None
    for node in reversed(rollup.emit.added):
        graph.erase_node(node)
    return list(reasons)


def replace_reader(
    rollup: Rollup, root: Node, join: Join, wanted: Callable[[str], bool], why: str = WHY
) -> Rewrite | None:
    """Swap the one contraction that reads the states of all steps for an operator that never writes them."""
    found = None if rollup.training else _only_reader(root)
    if found is None or not wanted(found[0].name):
        return None
    reader, between = found

    def read(rollup: Rollup, _: Node) -> Node:
        copies = {root: join(rollup, root)}
        rollup.emit.at(reader)

        def copy(node: Any) -> Node:
            if node not in copies:
                args = map_arg(node.args, lambda x: copy(x) if x in between else x)
                copies[node] = rollup.emit.call(node.target, *args, **node.kwargs)
            return copies[node]

        return copy(reader)

    rewrite = replace(rollup, reader, read, dual=True, why=why)
    rollup.emit.settle()  # what stands before the reader may stand after the next root
    return rewrite


def _only_reader(root: Node) -> tuple[Node, set[Node]] | None:
    """Return the contraction that alone reads a value, and the nodes through which it does."""
    readers: set[Node] = set()
    between, stack = {root}, [root]
    while stack:
        for user in stack.pop().users:
            if user.target in _CONTRACTIONS:
                readers.add(user)
            elif user.op == "call_function" and (is_view(user) or user.target is aten.mul.Tensor):
                between.add(user)
                stack.append(user)
            else:
                return None
    return (readers.pop(), between) if len(readers) == 1 else None


def replace(
    rollup: Rollup, root: Node, join: Join, anchor: Node | None = None, dual: bool = False, why: str = WHY
) -> Rewrite | None:
    """Swap a root for its value over all steps; None if no loop is behind it, or no ``dual`` where one is asked for."""
    loops = len(rollup.loops)
    anchor = anchor or root
    rollup.emit.at(anchor)
    new = join(rollup, root)
    if not rollup.loops or not _scans(new):
        return None
    for loop in [] if rollup.training else rollup.loops[loops:]:
        new = dualise(rollup, loop, new)
    if dual and all(loop.operator == "linear_scan" for loop in rollup.loops[loops:]):
        return None
    build = Builder(anchor)
    new = build.restride(new, value(root))
    rollup.emit.added += build.added
    live = upstream(new)
    added = [node for node in rollup.emit.added if node in live]
    added += _computed_anew(added, rollup)
    inside = _region(root, added, rollup)
    found = rollup.loops[loops:] or rollup.loops[-1:]
    first = found[0]
    return replace_node(
        root,
        new,
        inside=inside,
        added=added,
        name="roll up loop",
        why=why,
        detail=first.described + (", against time" if first.reverse else ""),
        multilinear=False,
        terms=concrete(first.length),
        spread=0.1,
    )


def _computed_anew(added: list[Node], rollup: Rollup) -> set[Node]:
    """Return nodes of single steps that the new value reads, because all steps compute the same.

    Both versions of the region compute them: as an input beside what they are computed from, the check would draw
    values for them that contradict what the other steps compute.
    """
    found: set[Node] = set()
    stack = [x for node in added for x in node.all_input_nodes]
    while stack:
        node = stack.pop()
        if node in rollup.members and node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def _region(root: Node, made: list[Node], rollup: Rollup) -> set[Node]:
    """Return the nodes of the original between what the new value reads and the root."""
    added = set(made)
    read = {x for node in added for x in node.all_input_nodes if x not in added}
    inside = rollup.members - read
    # The operators' arguments may be read from further up than the loop did, before a negation say.
    after: set[Node] = set()
    for node in root.graph.nodes:
        if any(x in read or x in after for x in node.all_input_nodes):
            after.add(node)
    stack = [x for x in region_inputs(root, inside) if x in after and x not in read]
    while stack:
        node = stack.pop()
        if node not in inside and node not in added:
            inside.add(node)
            stack.extend(x for x in node.all_input_nodes if x in after and x not in read)
    return inside


def dualise(rollup: Carries, loop: Loop, new: Node) -> Node:
    """Replace a scan whose states are only contracted by an operator that never writes them; returns what is new."""
    scan, body = loop.scan, loop.body
    if loop.reverse or scan is None or body is None or body.reset is not None:
        return new
    shape = [loop.length, *value(loop.steps[0]).shape]
    states = States(scan, loop.previous, shape, downstream(scan))
    for node in [n for n in upstream(new) if n.target in _CONTRACTIONS and n in states.dependent]:
        read = reading(rollup.emit, node, states)
        if read is None or len(shape) < 3:
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
        readers = list(node.users)
        node.replace_all_uses_with(y)
        rollup.emit.settle()
        result = y if node is new else new
        if scan in upstream(result):  # its states are used otherwise, too
            y.replace_all_uses_with(node)
            continue
        loop.last = rollup.emit.cast(last, value(loop.steps[0]).dtype)
        sort_topologically(new.graph)
        refresh(new.graph, readers, but=new if new.op == "output" else None)
        used = {n.target for n in upstream(y)}
        made = (name for name in ("ssd", "selective_scan") if OPS[name] in used)
        loop.operator = next(made, "linear_scan over chunks")
        return result
    return new


def _scans(new: Node) -> bool:
    """Tell whether a value comes out of a scan."""
    return any(node.target in SCANS for node in upstream(new))


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
    return _place(rollup, root, base, [(write, content(write)) for write in writes])


def _place(rollup: Rollup, root: Node, base: Node, writes: list[tuple[Node, Node]]) -> Node:
    """Write the values of all steps at once."""
    positions: list[Any] = [position(write) for write, _ in writes]
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
            place = (term.target, position(term))
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
    live = upstream(graph.output_node()) if rollup.loops else set()
    for loop in rollup.loops:
        at = 0 if loop.reverse else len(loop.steps) - 1
        node, states = loop.steps[at], loop.states
        if node not in live or states is None:
            continue

        def join(rollup: Rollup, root: Node, loop: Loop = loop, states: Node = states, at: int = at) -> Node:
            last = loop.last or rollup.emit.call(aten.select.int, states, 0, at)
            return rollup.emit.call(aten.clone.default, last)

        yield node, join, (loop.last or states).next


# Loops of which only the last state is used ---------------------------------------------------


def _chains(graph: Graph, rolled_up: set[Node]) -> Iterator[list[Node]]:
    """Find nodes of one kind and source line, each fed by the one before it, that no loop accounts for; last first."""
    live = upstream(graph.output_node())
    kinds: dict[Any, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if node in live and is_pointwise(node.target) and is_tensor(node) and value(node).is_floating_point():
            kinds[node.target, source_line(node), str(value(node).shape)].append(node)
    order = {node: i for i, node in enumerate(graph.nodes)}
    for nodes in sorted(kinds.values(), key=lambda nodes: -order[nodes[-1]]):
        members = {node for node in nodes if node not in rolled_up}
        for end in nodes[::-1]:
            if end not in members or end in rolled_up or len(members) < SHORTEST_CHAIN:
                continue
            chain = [end]
            while (before := _nearest(chain[-1], members)) is not None:
                chain.append(before)
            members -= set(chain)
            if len(chain) >= SHORTEST_CHAIN:
                yield chain[::-1]


def _nearest(node: Node, members: set[Node]) -> Node | None:
    """Return the nearest member that feeds a node, looking a step's length back."""
    seen, queue = {node}, deque([node])
    while queue and len(seen) < _STEP_NODES:
        for x in queue.popleft().all_input_nodes:
            if x in members:
                return x
            if x not in seen:
                seen.add(x)
                queue.append(x)
    return None


def _replace_end(rollup: Rollup, chain: list[Node]) -> Rewrite | None:
    """Swap the last of a chain of steps, some of whose kind may stand in one step, for the last state of a scan."""
    end = chain[-1]
    for period in range(1, _TERMS + 1):
        steps = chain[::-1][::period][::-1]

        def last(rollup: Rollup, root: Node, steps: list[Node] = steps) -> Node:
            return rollup.emit.call(aten.select.int, rollup.stack(steps, root), 0, len(steps) - 1)

        try:
            return replace(rollup, end, last)
        except NotALoop:
            continue
    return None
