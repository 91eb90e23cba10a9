"""Hand a delta rule, or linear attention, that was written in chunks to the operator that it is (design decision 4).

Public code cuts time into chunks, inverts for each the matrix of what its tokens correct of each other, and goes from
chunk to chunk with a state:

    U = inverse(I + L) (beta V - beta exp(G) K S)       L = beta K K^T and its decays, strictly lower
    Y = exp(G) Q S + (Q K^T and its decays) U           S <- exp(G[end]) S + (exp(G[end] - G) K)^T U

What is read may be other than the keys (Comba), also before the state decays; gates may take the place of strengths
(GDN-2); and values may be written with keys of their own (IPLR and DPLR, which RWKV-7 is). Without L, U is V: linear
attention, gated or not.

The inverse is spelled as a triangular solve, or row after row; decays are one per head or one per key, of each token
or, in lightning attention, of all tokens; the loop over chunks has been unrolled. So not the products are read, but
what enters them: each operand is cut into chunks, all at once or one by one, where the outputs are merged again. Which
operand is which follows from what it reaches (`_roles`). The check of the region decides whether it is the delta rule.
If it is not, the code stays as it is.

Shapes. Operands are (b, h, t, n), (b, h, t, p) and (b, h, t), or with time before the heads; cut into chunks, time is
two axes. States are (b, h, n, p). Sources: Yang, Kautz & Hatamizadeh 2024 (arXiv:2412.06464), section 3; for linear
attention, Yang et al. 2024 (arXiv:2312.06635), section 4.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import accumulate
from operator import getitem

import torch
from torch.fx import Graph, Node

from ..ir.builder import Builder, constants, downstream, sort_topologically, tensors_read, upstream
from ..ir.fx import (
    CONVERT,
    RESHAPES,
    SUMS,
    SizesFixed,
    arg,
    concrete,
    fix,
    is_tensor,
    is_training,
    power,
    same,
    sizes,
    value,
)
from ..ir.operators import RANK_ONE
from ..ir.rewrite import Rewrite, replace_node
from ..ir.views import is_view
from ..recurrence.delta_tokens import Tokens
from ..recurrence.duality import FORGETS
from ..recurrence.scatters import position, slice_writes

aten = torch.ops.aten
_MOVES = (aten.select.int, aten.slice.Tensor, CONVERT)
MOST = 40_000
"""How many nodes may lie between operands and outputs: some dozens for each chunk."""
OPERANDS = 8
"""How many operands there may be: above a layer that is no such rule lie those of all layers before it."""


def fuse_chunked_deltas(graph: Graph, wanted: Callable[[str], bool]) -> Iterator[Rewrite]:
    """Replace delta rules in chunks: their outputs and their last states.

    Raises:
        SizesFixed: What was found holds for these sizes alone.
    """
    if is_training(graph):
        return
    cuts = Counter(
        (sizes(cut.source)[cut.axis], cut.length)
        for node in graph.nodes for cut in _cuts(node) if cut.length and cut.start % cut.length == 0
    )  # fmt: skip
    for root in list(graph.nodes):
        merged = [(axis, chunks) for axis, chunks in _merges(root) if cuts[chunks] >= len("qkv")]
        if not merged or not wanted(root.name):
            continue
        if (found := _read(root, *merged[-1])) is not None:
            if _fix_sizes(found):
                raise SizesFixed(f"this compile is for these sizes alone: chunks are told by them [{root.name}]")
            yield from _replace(found, wanted)
            sort_topologically(graph)
            graph.eliminate_dead_code()


Chunks = tuple[int, int]
"""How many tokens there are, and how many a chunk has; a last one may be shorter."""


@dataclass(frozen=True)
class _Cut:
    """A node that is one chunk of another, or all of them: of which, on which axis, from where, and how many tokens."""

    source: Node
    axis: int
    start: int
    length: int

    def is_of(self, chunks: Chunks) -> bool:
        """Tell whether a tensor was cut into these."""
        whole, length = chunks
        fits = self.start % length == 0 and self.length == min(length, whole - self.start)
        return fits and sizes(self.source)[self.axis] == whole


def _cuts(node: Node) -> list[_Cut]:
    """List nodes that one cuts, or is a chunk of."""
    if node.target in RESHAPES:
        return [_Cut(arg(node, 0), axis, 0, length) for axis, (_, length) in _fits(arg(node, 0), node)]
    if node.target is aten.slice.Tensor and arg(node, 4, "step", 1) == 1:
        source, axis, start = arg(node, 0), arg(node, 1, "dim", 0), arg(node, 2, "start") or 0
    elif node.target is getitem and arg(node, 0).target is aten.split.Tensor:
        split = arg(node, 0)
        source, axis = arg(split, 0), arg(split, 2, "dim", 0)
        start = arg(node, 1) * concrete(split.meta["val"][0].shape[axis])
    else:
        return []
    axis %= value(source).dim()
    start = concrete(start.meta["val"]) if isinstance(start, Node) else start
    start += sizes(source)[axis] * (start < 0)
    return [_Cut(source, axis, start, sizes(node)[axis])] if start >= 0 else []


def _merges(node: Node) -> list[tuple[int, Chunks]]:
    """List axes that a node may merge of chunks, and these."""
    if node.target in RESHAPES:
        return _fits(node, arg(node, 0))
    if node.target is aten.cat.default:
        parts, axis = arg(node, 0), arg(node, 1, "dim", 0) % value(node).dim()
        lengths = [sizes(part)[axis] for part in parts]
    elif node.target is aten.slice_scatter.default and not any(x.target is node.target for x in node.users):
        places = [position(write) for write in slice_writes(node)]
        axis, lengths = places[0][0] if places[0] else 0, [at[2] for at in places if at]
        if [at and at[:2] for at in places] != [(axis, start) for start in accumulate(lengths[:-1], initial=0)]:
            return []
    else:
        return []
    whole = sizes(node)[axis]
    if not lengths or sum(lengths) != whole:
        return []
    *others, last = lengths
    return [(axis, (whole, lengths[0]))] if {*others} <= {lengths[0]} and last <= lengths[0] else []


def _fits(long: Node, short: Node) -> list[tuple[int, Chunks]]:
    """Return axes of ``long`` that may be two neighbouring axes of ``short``, as chunks."""
    if not (is_tensor(long) and is_tensor(short)):
        return []
    whole, parts = sizes(long), sizes(short)
    if len(parts) != len(whole) + 1:
        return []
    return [
        (axis, (size, parts[axis + 1])) for axis, size in enumerate(whole)
        if parts[:axis] == whole[:axis] and parts[axis + 2 :] == whole[axis + 1 :]
        and parts[axis] * parts[axis + 1] == size
    ]  # fmt: skip


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

    @classmethod
    def of(cls, node: Node, time: int, like: torch.Tensor) -> _Operand:
        """Read what was cut, next to outputs; without a last axis of size one that was put there."""
        last = value(node).dim() == like.dim()
        thin = last and value(node).shape[-1] == 1 != like.shape[-1]
        if thin and node.target is aten.unsqueeze.default and time < value(node).dim() - 1:
            return cls(arg(node, 0), time, wide=False, thin=False)
        return cls(node, time, last and not thin, thin)

    def laid(self, build: Builder) -> Node:
        """Return it as (b, t, h) and, if it has one, its last axis."""
        x = build.call(aten.squeeze.dim, self.node, -1) if self.thin else self.node
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
        q: The queries, and k next the keys.
        v: Factors of the values.
        r: Factors of what is read; the keys if there are none.
        under: The keys that values are written with; none if they are those of corrections.
        g: The log decay; None where that is no operand.
        power: What log decays are multiplied by before they are exponents of e.
        fade: What a chunk multiplies states by, if all tokens decay alike; None if there is g, or nothing decays.
        length: How many tokens a chunk has.
        early: Whether a token reads the state before it decays.
        beta: Strengths; None if they are one.
        erase: Whether anything is corrected.
        initial: The state before the first; None for zeros.
        scale: What queries are multiplied by.
    """

    root: Node
    time: int
    last: Node | None
    q: _Operand
    k: _Operand
    v: list[_Operand]
    r: list[_Operand]
    under: list[_Operand]
    g: _Operand | None
    power: float
    fade: Node | float | None
    length: int
    early: bool
    beta: _Operand | None
    erase: bool
    initial: Node | None
    scale: float


class _Region:
    """What lies between operands in chunks and a node that merges chunks.

    Attributes:
        nodes: The nodes.
        operands: What is cut into chunks like the outputs.
    """

    def __init__(self, root: Node, chunks: Chunks) -> None:
        """Walk up from what merges chunks to where as many of the same length were cut."""
        self.root, self.nodes, self.cuts, ahead = root, set[Node](), dict[Node, _Operand](), deque(root.all_input_nodes)
        operands = dict[Node, _Operand]()
        while ahead and len(self.nodes) <= MOST and len(operands) <= OPERANDS:
            node = ahead.popleft()
            if node in self.nodes or node in self.cuts or node.op != "call_function":
                continue
            if found := [cut for cut in _cuts(node) if cut.is_of(chunks)]:
                operand = _Operand.of(found[-1].source, found[-1].axis, value(root))
                self.cuts[node] = operands.setdefault(operand.node, operand)
                continue
            self.nodes.add(node)
            ahead.extend(node.all_input_nodes[node.target is aten.copy.default :])  # not what is written to
        self.complete = not ahead
        self.operands = list(operands.values())

    def pieces(self, part: _Operand) -> list[Node]:
        """Return the nodes that cut an operand."""
        return [node for node, operand in self.cuts.items() if operand.node is part.node]

    @cached_property
    def reached(self) -> dict[Node, frozenset[Node]]:
        """On which operands each node depends, of those that are computed from chunks that are not merged yet."""
        found = {node: frozenset([operand.node]) for node, operand in self.cuts.items()}
        below = downstream(*self.cuts, until={self.root}) - {self.root}
        for node in sorted(below - found.keys()):
            if node.op == "call_function":
                found[node] = frozenset[Node]().union(*(found[x] for x in node.all_input_nodes if x in found))
        return found

    def states(self, k: _Operand, values: list[_Operand], q: _Operand) -> list[Node]:
        """List sums shaped as a state, or as those of all chunks, of keys and values, but not of queries."""
        size = [sizes(part.node)[-1] for part in (k, values[0])]
        needed = {part.node for part in (k, *values)}
        return [
            node for node, read in self.reached.items()
            if node.target in (*SUMS, aten.cumsum.default) and needed <= read and q.node not in read
            and value(node).dim() == value(k.node).dim() + (node.target not in SUMS)
            and sizes(node)[-2:] == size
        ]  # fmt: skip

    @cached_property
    def constants(self) -> set[Node]:
        """Tensors that are the same every time."""
        return constants(self.root.graph)

    def corrects(self, node: Node) -> bool:
        """Tell whether an inverse may be computed here: by a solve, or in place, row after row."""
        writes = slice_writes(node)
        rows = bool(writes) and arg(writes[0], 0) not in self.constants  # else these are outputs, in a buffer
        return rows or node.target is aten.linalg_solve_triangular.default

    @cached_property
    def inverted(self) -> list[frozenset[Node]]:
        """The operands of matrices that may be inverted, in order."""
        matrices = [arg(node, 0) for node in self.reached if self.corrects(node)]
        return [self.reached[matrix] for matrix in matrices if matrix in self.reached]

    @cached_property
    def corrected(self) -> set[Node]:
        """What is computed from an inverse."""
        found = set[Node]()
        for node in self.reached:
            if self.corrects(node) or any(x in found for x in node.all_input_nodes):
                found.add(node)
        return found

    def writers(self, states: list[Node], values: list[_Operand]) -> set[Node]:
        """Return operands that states are written with: those of products with values that were corrected."""
        found, stack = set[Node](), [x for node in states for x in node.all_input_nodes]
        while stack:
            read = tensors_read(stack.pop())
            if len(read) == 1:  # a view, a conversion, or the sum of a product
                stack.extend(read)
            elif any(x in self.corrected and {part.node for part in values} <= self.reached[x] for x in read):
                found.update(*(self.reached[x] for x in read if x in self.reached and x not in self.corrected))
        return found

    def fades(self, states: list[Node]) -> list[Node | float]:
        """List what states are multiplied by on their way to the next ones, if it depends on no operand."""
        read = [x for state in states for x in state.all_input_nodes if x < self.root]
        pairs = [pair for x in read if x.target is aten.mul.Tensor for pair in (x.args[:2], x.args[1::-1])]
        return [x for x, y in pairs if x not in self.reached and (y in states or y not in self.reached)]  # type: ignore

    def is_weighted(self, q: _Operand) -> bool:
        """Tell whether queries are multiplied by tensors that depend on no operand."""
        products = [x for x, read in self.reached.items() if x.target is aten.mul.Tensor and read == {q.node}]
        return any(isinstance(x, Node) and x not in self.reached for node in products for x in node.args)

    def powers(self, g: _Operand) -> set[float]:
        """List logarithms of the bases of which powers are taken, with what log decays were multiplied by before."""
        found = {x[1] for node, read in self.reached.items() if read == {g.node} and (x := power(node))}
        return {x * _scale(g, self) for x in found or {1.0}}

    @cached_property
    def together(self) -> set[frozenset[Node]]:
        """Operands on which some node depends, and on no others."""
        return set(self.reached.values())

    def meet(self, a: _Operand, b: _Operand, wide: list[_Operand]) -> bool:
        """Tell whether something depends on two operands and on no other that is as wide."""
        return any({part.node for part in wide} & read == {a.node, b.node} for read in self.together)

    def others(self, fade: Node | float | None) -> list[Node]:
        """List what else the region reads but constants and decays, before it is seen as another shape."""
        found, decays, faded = set[Node](), _inputs(fade), (aten.mul.Tensor, (fade,))
        for node in self.nodes & self.reached.keys():
            for x in tensors_read(node):
                while x not in self.reached and (is_view(x) or (x.target, x.args[1:]) == faded):
                    x = arg(x, 0)
                if not (x in self.reached or x in self.constants or (decays and decays & _inputs(x))):
                    found.add(x)
        return list(found)


def _read(root: Node, time: int, chunks: Chunks) -> _Rule | None:
    """Read outputs that are merged of chunks; None if they are no delta rule's.

    Sums over time are taken of the decay. The inverse is computed of what is read and of keys, and a state is written
    with keys. Queries alone do not reach the states. What both values and reads were multiplied by are strengths.
    Where nothing is corrected, keys are what meets queries before values do.
    """
    if not time or not value(root).is_floating_point() or time >= value(root).dim() - 1:  # rows come first
        return None
    region = _Region(root, chunks)
    if not region.complete:
        return None
    g = next((part for part in region.operands if aten.cumsum.default in _readers(part, region)), None)
    early = g is not None and len(_readers(g, region)) > 1  # sums without a token's own decay
    wide = [part for part in region.operands if part.wide and part is not g]
    narrow = [part for part in region.operands if not part.wide and part is not g]
    for q, k, values, reads, under in _roles(region, wide):
        states = region.states(k, values, q) if _fit(root, [q, k, *under], values) else []
        if not states or (reads is not None and k.node not in region.writers(states, values)):
            continue
        fades = [] if g is not None else region.fades(states)
        fade = next((x for x in fades if _has_logarithm(x, states[-1])), None)
        if g is None and not (bool(fades) == (fade is not None) == region.is_weighted(q)):
            return None
        powers = {1.0} if g is None else region.powers(g)
        others = region.others(fade)
        initial = next(iter(others), None)
        one_by_one = [node for node in states if node.target in SUMS]
        if len(others) > 1 or (initial and sizes(initial) not in map(sizes, one_by_one)):
            return None
        own, read, beta = (values, [], None) if reads is None else _without_strengths(k, values, reads)
        if len(powers) > 1 or len(narrow) > (reads is not None and beta is None) or (reads is None and early):
            return None
        last = [node for node in one_by_one if node not in region.nodes]
        return _Rule(
            root, time, last[-1] if last else None, q, k, own, read, under, g, powers.pop(), fade, chunks[1], early,
            beta or next(iter(narrow), None), reads is not None, initial, _scale(q, region),
        )  # fmt: skip
    return None


_Roles = tuple[_Operand, _Operand, list[_Operand], list[_Operand] | None, list[_Operand]]


def _roles(region: _Region, wide: list[_Operand]) -> Iterator[_Roles]:
    """Tell wide operands apart: queries, keys, values, what is read (None if nothing is), and keys of values."""
    of_inverses = dict.fromkeys(tuple(part for part in wide if part.node in read) for read in region.inverted)
    for inner in of_inverses:
        outer = [part for part in wide if part not in inner]
        for k, q in itertools.product(inner, outer):
            values, reads = ([part for part in some if part is not one] for some, one in ((outer, q), (inner, k)))
            if len(reads) > 1 or not 0 < len(values) < 3:
                continue
            under = [x for x in values for r in reads if len(values) == 2 and region.meet(x, r, wide)]
            yield q, k, [x for x in values if x not in under], reads, under
    for q, k, v in itertools.permutations(wide) if len(wide) == 3 else ():
        if region.meet(q, k, wide) and all(q.node in read for read in region.inverted):
            yield q, k, [v], None, []


def _without_strengths(
    k: _Operand, values: list[_Operand], reads: list[_Operand]
) -> tuple[list[_Operand], list[_Operand], _Operand | None]:
    """Take strengths out of values and of what is read; the latter is empty if it is the keys."""
    if len(values) > 1 or not reads:  # two gates: what is read is the keys times one of them
        return values, [k, *reads] if reads else [], None
    (v,), (r,) = values, reads
    (own, one), (read, other) = _strengthened(v.node), _strengthened(r.node)
    if one is None or one is not other:
        return values, reads, None
    beta = _Operand(one, r.time, wide=False, thin=False)
    return [replace(v, node=own)], [] if read is k.node else [replace(r, node=read)], beta


def _fit(root: Node, keys: list[_Operand], values: list[_Operand]) -> bool:
    """Tell whether widths are those of queries, keys and values."""
    of_keys, of_values = ({sizes(part.node)[-1] for part in some} for some in (keys, values))
    return len(of_keys) == 1 and of_values == {sizes(root)[-1]}


def _fix_sizes(rule: _Rule) -> bool:
    """Make numbers of the sizes that a rule was read by, but for how many rows there are; tell whether one was none."""
    root, parts = rule.root, [rule.q, rule.k, *rule.v, *rule.r, *rule.under, rule.g, rule.beta]
    nodes = [root, *tensors_read(root), *(part.node for part in parts if part), *filter(None, [rule.initial])]
    shapes = [value(node).shape for node in nodes]
    return fix(size for shape in shapes for size in (shape[1:] if same(shape[0], shapes[0][0]) else shape))


def _scale(q: _Operand, region: _Region) -> float:
    """Return the number that queries are multiplied by in chunks, before anything else is done with them."""
    readers, scale = region.pieces(q), 1.0
    while True:
        readers = [user for node in readers for user in node.users]
        numbers = {_number(node) for node in readers}
        if len(numbers) != 1 or None in numbers:
            return scale
        scale *= numbers.pop() or 0.0


def _number(node: Node) -> float | None:
    """Read the number that a node multiplies its only operand by; None if it does anything else."""
    if node.target is aten.mul.Tensor and isinstance(node.args[1], int | float):
        return float(node.args[1])
    return 1.0 if is_view(node) or node.target is CONVERT else None


def _inputs(x: Node | float | None) -> set[Node]:
    """Return the inputs of the graph on which a value depends."""
    return {node for node in upstream(x) if node.op != "call_function"} if isinstance(x, Node) else set()


def _has_logarithm(fade: Node | float, state: Node) -> bool:
    """Tell whether a factor of states is an exponential, one for each head or key, or a positive number."""
    if not isinstance(fade, Node):
        return 0 < fade < math.inf
    if not is_tensor(fade) or value(fade).dim() > value(state).dim() or value(fade).shape[-1:] not in ((), (1,)):
        return False
    return power(_moved(fade)[-1]) is not None


def _moved(x: Node) -> list[Node]:
    """List the moves of a value, the last first, and then what was moved."""
    found = [x]
    while is_view(found[-1]) or found[-1].target in _MOVES:
        found.append(arg(found[-1], 0))
    return found


def _logarithm(build: Builder, fade: Node) -> Node:
    """Emit the logarithm of an exponential that was moved since."""
    *moves, exponential = _moved(fade)
    read = power(exponential)
    assert read is not None  # `_has_logarithm`
    x = build.times(*read)
    for move in reversed(moves):
        kept = move.target in RESHAPES
        x = build.reshape(x, value(move).shape) if kept else build.call(move.target, x, *move.args[1:], **move.kwargs)
    return x


def _decays(build: Builder, rule: _Rule, k: Node) -> Node | None:
    """Emit the log decays of tokens, as (b, t, h) or (b, t, h, n)."""
    if rule.g is not None:
        return build.call(aten.clamp_min.default, build.times(rule.g.laid(build), rule.power), FORGETS)
    if rule.fade is None:
        return None
    rows, tokens, heads, n = value(k).shape
    if not isinstance(rule.fade, Node):
        kinds = {"dtype": torch.promote_types(value(k).dtype, torch.float32), "device": value(k).device}
        return build.call(aten.full.default, [rows, tokens, heads], math.log(rule.fade) / rule.length, **kinds)
    log = build.call(aten.clamp_min.default, _logarithm(build, rule.fade), FORGETS)
    log = build.call(aten.div.Tensor, log, rule.length)
    keyed = value(log).dim() > 1 and value(log).shape[-2] > 1
    each = [rows, heads][: value(rule.k.node).dim() - 2]  # as states have them
    log = build.expand(log, [*each, n if keyed else 1, 1])
    log = build.reshape(log, [rows, 1, heads, n] if keyed else [rows, 1, heads])
    return build.dense(build.expand(log, [rows, tokens, heads, n][: value(log).dim()]))


def _readers(part: _Operand, region: _Region) -> set[object]:
    """Name the operations that read an operand in chunks."""
    found, stack = set[object](), region.pieces(part)
    while stack:
        for user in stack.pop().users.keys() & region.nodes:
            if _number(user) is not None:  # copies are views here
                stack.append(user)
            else:
                found.add(user.target)
    return found


def _strengthened(node: Node) -> tuple[Node, Node | None]:
    """Read ``x * beta[..., None]``; the node itself and None if it is not that."""
    if node.target is aten.mul.Tensor:
        for x, other in (node.args, node.args[::-1]):
            if not (isinstance(other, Node) and other.target is aten.unsqueeze.default and isinstance(x, Node)):
                continue
            if value(other).shape[-1] == 1 and value(x).shape == value(node).shape:
                return x, arg(other, 0)
    return node, None


def _product(build: Builder, factors: list[_Operand], dtype: torch.dtype) -> Node | None:
    laid = [build.cast(part.laid(build), dtype) for part in factors]
    return build.combined(aten.mul.Tensor, laid) if laid else None


def _replace(rule: _Rule, wanted: Callable[[str], bool]) -> Iterator[Rewrite]:
    """Emit the operator and replace what it computes."""
    root, like = rule.root, value(rule.root)
    build = Builder(root)
    # Chunks may have been widened after they were cut: then the result is as wide.
    parts = [rule.q, rule.k, *rule.v, *rule.r, *rule.under]
    dtype = reduce(torch.promote_types, (value(part.node).dtype for part in parts), like.dtype)
    q, k, v, r, under = (_product(build, some, dtype) for some in ([rule.q], [rule.k], rule.v, rule.r, rule.under))
    assert q is not None
    assert k is not None
    given: dict[str, Node | None] = {
        "k": k, "v": v,
        # What is written under other keys is written to the state, and what is read is added.
        "r": build.call(aten.neg.default, r) if r and under else r,
        "g": _decays(build, rule, k),
        "beta": None if rule.beta is None else rule.beta.laid(build),
        "initial_state": None,
    }  # fmt: skip
    rows, tokens, heads = value(k).shape[0], *sizes(k)[1:3]
    if rule.initial is not None:
        start = build.reshape(rule.initial, [rows, heads, *value(rule.initial).shape[-2:]])
        given["initial_state"] = build.dense(start)
    each = Tokens(build, tokens, rule.early, under)
    result = build.call(
        RANK_ONE.target, *RANK_ONE.args(q=each.queries(q), **each.arguments(given), scale=rule.scale, erase=rule.erase)
    )
    y, last = each.results(build.call(getitem, result, 0)), each.state(build.call(getitem, result, 1))
    p = value(y).shape[-1]
    if rule.time == like.dim() - 2:  # the outputs have heads before time
        y = build.permute(y, [0, 2, 1, 3])
    y = build.restride(build.cast(build.reshape(y, list(like.shape)), like.dtype), like)
    found = [(root, y)]
    if rule.last is not None and wanted(rule.last.name):
        old = value(rule.last)
        found.append((rule.last, build.restride(build.cast(build.reshape(last, list(old.shape)), old.dtype), old)))
    made = set(build.added)
    if isinstance(rule.fade, Node):
        made |= {x for x in upstream(rule.fade) if x.op == "call_function"}  # factors of all chunks have one source
    for before, after in found:
        yield replace_node(
            before,
            after,
            inside=constants(root.graph),  # zeros of as many rows as there are stay zeros where a check makes values up
            added=made,
            name=f"fuse chunked {'delta rule' if rule.erase else 'linear attention'}",
            why=f"products {'and an inverse ' if rule.erase else ''}of each chunk are written out and read again",
            detail=f"{tokens} tokens, {heads} heads of {value(last).shape[2]} x {p} as one {RANK_ONE.name}",
            multilinear=False,
            terms=tokens,
            timed_alone=before is root,  # the last state falls off while the outputs are computed
            spread=0.1,
            guessed=True,
        )
