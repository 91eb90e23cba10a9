"""Hand a delta rule that was written in chunks to the operator that it is (design decision 4).

Public code cuts time into chunks, inverts for each the matrix of what its tokens correct of each other, and goes from
chunk to chunk with a state:

    U = inverse(I + L) (beta V - beta exp(G) K S)       L = beta K K^T and its decays, strictly lower
    Y = exp(G) Q S + (Q K^T and its decays) U           S <- exp(G[end]) S + (exp(G[end] - G) K)^T U

The inverse is spelled as a triangular solve, or row after row; decays are one per head or one per key; the loop over
chunks has been unrolled. So not the products are read, but what enters them: each operand is cut into chunks, where
the outputs are merged again. Which operand is which follows from what it reaches (`_roles`). The check of the region
decides whether it is the delta rule. If it is not, the code stays as it is.

Shapes. Operands are (b, h, t, n), (b, h, t, p) and (b, h, t), or with time before the heads; cut into chunks, time is
two axes. States are (b, h, n, p). Source: Yang, Kautz & Hatamizadeh 2024 (arXiv:2412.06464), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import getitem

import torch
from torch.fx import Graph, Node

from ..ir.builder import Builder, is_constant, sort_topologically
from ..ir.fx import RESHAPES, SUMS, arg, is_tensor, is_training, value
from ..ir.operators import RANK_ONE
from ..ir.rewrite import Rewrite, replace_node
from ..ir.views import is_view
from ..recurrence.duality import FORGETS

aten = torch.ops.aten
_CONVERT = torch.ops.prims.convert_element_type.default
MOST = 40_000
"""How many nodes may lie between operands and outputs: some dozens for each chunk."""


def fuse_chunked_deltas(graph: Graph, wanted: Callable[[str], bool]) -> Iterator[Rewrite]:
    """Replace delta rules in chunks: their outputs and their last states."""
    if is_training(graph):
        return
    below = set[Node]()
    for node in graph.nodes:
        if _corrects(node) or any(x in below for x in node.all_input_nodes):
            below.add(node)
    for root in [node for node in graph.nodes if node in below and node.target in RESHAPES]:
        if wanted(root.name) and (found := _read(root)) is not None:
            yield from _replace(found, wanted)
            sort_topologically(graph)
            graph.eliminate_dead_code()


def _corrects(node: Node) -> bool:
    """Tell whether an inverse may be computed here: by a solve, or in place, row after row."""
    return node.target in (aten.linalg_solve_triangular.default, aten.slice_scatter.default)


def _cut(long: Node, short: Node, chunks: list[int] | None = None) -> int | None:
    """Return the last axis of ``long`` that is two neighbouring axes of ``short``, all others being the same."""
    if not (is_tensor(long) and is_tensor(short)):
        return None
    whole, parts = list(value(long).shape), list(value(short).shape)
    if len(parts) != len(whole) + 1 or not all(isinstance(size, int) for size in (*whole, *parts)):
        return None
    fits = [
        axis for axis, size in enumerate(whole)
        if parts[:axis] == whole[:axis] and parts[axis + 2 :] == whole[axis + 1 :]
        and parts[axis] * parts[axis + 1] == size and chunks in (None, parts[axis : axis + 2])
    ]  # fmt: skip
    return fits[-1] if fits else None


@dataclass(frozen=True)
class _Operand:
    """What is cut into chunks.

    Attributes:
        node: As it was before.
        time: Its axis of time.
        wide: Whether its last axis is one of keys or values.
        thin: Whether it has a last axis of size one instead.
    """

    node: Node
    time: int
    wide: bool
    thin: bool

    def laid(self, build: Builder, node: Node | None = None) -> Node:
        """Return it, or a node with its axes, as (b, t, h) and, if it has one, its last axis."""
        x = node or self.node
        x = build.call(aten.squeeze.dim, x, -1) if self.thin else x
        leading = [axis for axis in range(value(x).dim() - self.wide) if axis != self.time]
        x = build.permute(x, [leading[0], self.time, *leading[1:], *([value(x).dim() - 1] if self.wide else [])])
        return build.dense(x if len(leading) == 2 else build.call(aten.unsqueeze.default, x, 2))


@dataclass(frozen=True)
class _Rule:
    """A delta rule in chunks.

    Attributes:
        root: The outputs, merged.
        time: Their axis of time.
        last: The last state, if it is read.
        q: The queries, as k, v, and g (None where nothing decays) next.
        beta: Strengths; None if they are one.
        values: What v is without strengths.
        initial: The state before the first; None for zeros.
        scale: What queries are multiplied by.
    """

    root: Node
    time: int
    last: Node | None
    q: _Operand
    k: _Operand
    v: _Operand
    g: _Operand | None
    beta: _Operand | None
    values: Node
    initial: Node | None
    scale: float


class _Region:
    """What lies between operands in chunks and a node that merges chunks.

    Attributes:
        nodes: The nodes.
        operands: What is cut into chunks like the outputs.
        others: What else the region reads but constants.
    """

    def __init__(self, root: Node, time: int) -> None:
        """Walk up from chunks, counted by an axis, to where as many of the same length were cut."""
        chunks, rank = list(value(root).shape[time : time + 2]), value(root).dim() - 1
        self.nodes, cuts, stack = set[Node](), dict[Node, _Operand](), [root]
        while stack and len(self.nodes) <= MOST:
            node = stack.pop()
            if node in self.nodes or node in cuts or node.op != "call_function":
                continue
            source = arg(node, 0) if node.target in RESHAPES else None
            axis = None if source is None else _cut(source, node, chunks)
            if axis is not None:
                last = value(source).dim() == rank  # type: ignore[arg-type]
                thin = last and value(source).shape[-1] == 1 != value(root).shape[-1]  # type: ignore[arg-type]
                cuts[node] = _Operand(source, axis, last and not thin, thin)  # type: ignore[arg-type]
                continue
            self.nodes.add(node)
            stack.extend(node.all_input_nodes)
        self.complete = not stack
        self.cuts = cuts
        self.operands = list({operand.node: operand for operand in cuts.values()}.values())

    def pieces(self, part: _Operand) -> list[Node]:
        """Return the nodes that cut an operand."""
        return [node for node, operand in self.cuts.items() if operand.node is part.node]

    @cached_property
    def reached(self) -> dict[Node, set[Node]]:
        """From which operands each node depends, of those that depend on some."""
        first = next(iter(self.cuts), None)
        found: dict[Node, set[Node]] = {}
        for node in first.graph.nodes if first is not None else ():
            if node in self.cuts:
                found[node] = {self.cuts[node].node}
            elif node.op == "call_function" and (parts := [found[x] for x in node.all_input_nodes if x in found]):
                found[node] = set[Node]().union(*parts)
        return found

    def states(self, k: _Operand, v: _Operand, q: _Operand) -> list[Node]:
        """Return sums that are shaped as a state is, and depend on keys and values, but not on queries."""
        size = [value(k.node).shape[-1], value(v.node).shape[-1]]
        return [
            node for node, read in self.reached.items()
            if node.target in SUMS and value(node).dim() == value(k.node).dim() and {k.node, v.node} <= read
            and q.node not in read and list(value(node).shape[-2:]) == size
        ]  # fmt: skip

    @cached_property
    def others(self) -> list[Node]:
        """What the region reads besides its operands and constants, before it is seen as another shape."""
        found = set[Node]()
        for node in self.nodes & self.reached.keys():
            for x in node.all_input_nodes:
                while is_view(x) and x not in self.reached:
                    x = arg(x, 0)
                if x not in self.reached and not is_constant(x):
                    found.add(x)
        return list(found)


def _read(root: Node) -> _Rule | None:
    """Read outputs that are merged of chunks; None if they are no delta rule's."""
    x = arg(root, 0)
    time = _cut(root, x) if is_tensor(x) else None
    if not time or not value(root).is_floating_point() or time >= value(root).dim() - 1:  # rows come first
        return None
    region = _Region(x, time)
    if not region.complete or not any(map(_corrects, region.nodes)):
        return None
    return _roles(root, time, region)


def _roles(root: Node, time: int, region: _Region) -> _Rule | None:
    """Tell operands apart.

    Sums over time are taken of the decay. Strengths multiply keys, which are read without them, too. Queries alone do
    not reach the states.
    """
    g = next((part for part in region.operands if _is_summed(part, region)), None)
    wide = {part.node: part for part in region.operands if part.wide and part is not g}
    narrow = [part for part in region.operands if not part.wide and part is not g]
    keys, values, beta = list(wide.values()), dict[Node, Node | None](zip(wide, wide, strict=True)), None
    for part in wide.values():
        base, strength = _strengthened(part.node)
        if strength is not None and base in wide:
            keys, beta = [wide[base]], _Operand(strength, part.time, wide=False, thin=False)
            # What is read without strengths, and values, which are never.
            wide = {x: y for x, y in wide.items() if x is not part.node}
            values = {x: _strengthened(x)[0] if _strengthened(x)[1] is strength else None for x in wide}
            break
    if len(wide) != 3 or len(narrow) > (beta is None):
        return None
    beta = beta or next(iter(narrow), None)
    for k in keys:
        rest = [part for part in wide.values() if part is not k]
        for q, v in (rest, rest[::-1]):
            own = values[v.node]
            states = region.states(k, v, q)
            if own is None or not states or not _fit(root, q, k, v):
                continue
            initial = next(iter(region.others), None)
            if len(region.others) > 1 or (initial and value(initial).shape != value(states[-1]).shape):
                return None
            last = [node for node in states if node not in region.nodes]
            scale = _scale(q, region)
            return _Rule(root, time, last[-1] if last else None, q, k, v, g, beta, own, initial, scale)
    return None


def _fit(root: Node, q: _Operand, k: _Operand, v: _Operand) -> bool:
    """Tell whether widths are those of queries, keys and values."""
    of_q, of_k, of_v = (value(part.node).shape[-1] for part in (q, k, v))
    return (of_q, of_v) == (of_k, value(root).shape[-1])


def _scale(q: _Operand, region: _Region) -> float:
    """Return the number that queries are multiplied by in chunks, before anything else is done with them."""
    readers, scale = region.pieces(q), 1.0
    while len(readers) == 1:
        (node,) = readers
        if node.target is aten.mul.Tensor and isinstance(node.args[1], int | float):
            scale *= node.args[1]
        elif not (is_view(node) or node.target is _CONVERT):
            break
        readers = list(node.users)
    return float(scale)


def _is_summed(part: _Operand, region: _Region) -> bool:
    """Tell whether sums of an operand are taken in each chunk, as of log decays."""
    stack = region.pieces(part)
    while stack:
        for user in stack.pop().users:
            if user.target is aten.cumsum.default:
                return True
            if is_view(user) or user.target is _CONVERT:  # copies are views here
                stack.append(user)
    return False


def _strengthened(node: Node) -> tuple[Node | None, Node | None]:
    """Read ``x * beta[..., None]``; the node itself and None if it is not that."""
    if node.target is aten.mul.Tensor:
        for x, other in (node.args, node.args[::-1]):
            if not (isinstance(other, Node) and other.target is aten.unsqueeze.default and isinstance(x, Node)):
                continue
            if value(other).shape[-1] == 1 and value(x).shape == value(node).shape:
                return x, arg(other, 0)
    return node, None


def _replace(rule: _Rule, wanted: Callable[[str], bool]) -> Iterator[Rewrite]:
    """Emit the operator and replace what it computes."""
    root, like = rule.root, value(rule.root)
    build = Builder(root)
    given: dict[str, Node | None] = {
        "q": rule.q.laid(build), "k": rule.k.laid(build), "v": rule.v.laid(build, rule.values),
        "g": None if rule.g is None else build.call(aten.clamp_min.default, rule.g.laid(build), FORGETS),
        "beta": None if rule.beta is None else rule.beta.laid(build),
        "initial_state": None,
    }  # fmt: skip
    if rule.initial is not None:
        rows, _, heads, _ = value(given["k"]).shape  # type: ignore[arg-type]
        start = build.reshape(rule.initial, [rows, heads, *value(rule.initial).shape[-2:]])
        given["initial_state"] = build.dense(start)
    result = build.call(RANK_ONE.target, *RANK_ONE.args(**given, scale=rule.scale))
    y, last = (build.call(getitem, result, i) for i in (0, 1))
    rows, tokens, heads, p = value(y).shape
    if rule.time == like.dim() - 2:  # the outputs have heads before time
        y = build.permute(y, [0, 2, 1, 3])
    y = build.restride(build.cast(build.reshape(y, list(like.shape)), like.dtype), like)
    found = [(root, y)]
    if rule.last is not None and wanted(rule.last.name):
        old = value(rule.last)
        found.append((rule.last, build.restride(build.cast(build.reshape(last, list(old.shape)), old.dtype), old)))
    made = set(build.added)
    for before, after in found:
        yield replace_node(
            before,
            after,
            added=made,
            name="fuse chunked delta rule",
            why="products and an inverse of each chunk are written out and read again",
            detail=f"{tokens} tokens, {heads} heads of {value(last).shape[2]} x {p} as one {RANK_ONE.name}",
            multilinear=False,
            terms=tokens,
            timed_alone=before is root,  # the last state falls off while the outputs are computed
            spread=0.1,
        )
