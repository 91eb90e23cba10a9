"""Find the dual of scans that are in the graph as such: loops that were captured, or the user's own calls.

A captured loop becomes a scan before autograd, when what feeds it is not decomposed yet. Here it is: if a contraction
alone reads the states, and their factors are those of a selective scan or a state space dual, they are never written.
A backward needs the states, so graphs for training are left alone.

Shapes. States are (b, t, ..., n) of at least four axes; contracted over n they are (b, t, ...). Source: the two forms
of one scan are those of Dao & Gu 2024 (arXiv:2405.21060).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, Node

from ..ir.builder import sort_topologically
from ..ir.fx import arg, is_erased, is_made, is_training, mark_as_made, place, same, value
from ..ir.metadata import refresh, substitute
from ..ir.operators import SCAN
from ..ir.rewrite import Rewrite
from ..recurrence.affine import Affine, Loop
from ..recurrence.replace import replace, replace_reader
from ..recurrence.reroll import Reroller
from ..recurrence.vectorize import Value

aten = torch.ops.aten

# A state of fewer axes, with batch and time, is no matrix per sequence: nothing is saved by not writing it.
MATRIX = 4
SHORTEST = 8
WHY = "all states are written, although only a contraction reads them"


def contract_scans(graph: Graph, wanted: Callable[[str], bool]) -> Iterator[Rewrite]:
    """Replace each ``linear_scan`` whose states are only contracted by an operator that does not write them."""
    scans = graph.find_nodes(op="call_function", target=SCAN.target)
    sums = graph.find_nodes(op="call_function", target=aten.cumsum.default)
    if not (scans or sums) or is_training(graph):
        return
    reroller = Reroller()
    for total in sums:
        if wanted(total.name) and (read := _summed(reroller, total, wanted)) is not None:
            yield read
    for scan in scans:
        states = _result(scan, 0)
        given = SCAN.given(scan.args)
        if states is None or given["reverse"] or given["cu_seqlens"] is not None or given["reset"] is not None:
            continue
        last = _last_state(graph, scan, states)
        rewrite = replace_reader(reroller, states, partial(_again, scan), wanted, WHY)
        if rewrite is None:
            continue
        for made in reroller.emit.added if not is_made(scan) else ():
            mark_as_made(made, False)  # it is the user's own call, in another form
        yield rewrite
        if last is not None and wanted(last.name):
            loop: Any = reroller.loops[-1]
            if (rest := replace(reroller, last, partial(_copied, loop), loop.last.next, why=WHY)) is not None:
                yield rest
                sort_topologically(graph)
    for node in reversed(reroller.emit.added):
        if not node.users and node.graph is graph and not is_erased(node):
            graph.erase_node(node)


def _result(scan: Node, index: int) -> Any:
    return next((user for user in scan.users if user.target is getitem and user.args[1] == index), None)


def _last_state(graph: Graph, scan: Node, states: Node) -> Any:
    """Let what reads the last of all states read the scan's second result; return that, if anything uses it."""
    last = _result(scan, 1)
    size, changed = value(states).shape[1], set[Node]()
    for view, time in [(states, 1), *((user, _time_of(user)) for user in states.users)]:
        users: list[Any] = list(view.users)
        for user in users:
            if user.target is not aten.select.int or time is None or user.args[1] % value(view).dim() != time:
                continue
            at = arg(user, 2)
            at = place(at.meta["val"] if isinstance(at, Node) else at, size)
            if (
                not (arg(user, 2) == -1 or (at is not None and same(at, size - 1)))
                or scan.meta["val"][1].dtype != value(user).dtype
            ):
                continue
            if last is None:
                with graph.inserting_after(scan):
                    last = graph.call_function(getitem, (scan, 1))
                last.meta = {**scan.meta, "val": scan.meta["val"][1]}
            if value(user).shape == value(last).shape:
                changed.update(substitute(user, last))
                graph.erase_node(user)
    refresh(graph, changed)
    return last if last is not None and last.users else None


def _time_of(view: Node) -> int | None:
    """Return where a permutation of the states, (b, t, ...), has the time axis."""
    order: Any = view.args[1] if view.target is aten.permute.default else ()
    return list(order).index(1) if 1 in order else None


def _again(scan: Any, reroller: Reroller, states: Node) -> Node:
    """Emit the scan, whose states are (b, t, ...), once more, as a loop whose dual can be looked for."""
    emit, given = reroller.emit, SCAN.given(scan.args)
    a, x, initial = (given[name] for name in ("a", "x", "initial_state"))
    twin = emit.call(getitem, emit.call(scan.target, *scan.args), 0)
    order = [1, 0, *range(2, value(x).dim())]
    while isinstance(initial, Node) and initial.target in (aten.clone.default, aten.expand.default):
        initial = initial.args[0]
    step = emit.call(aten.select.int, twin, 1, 0)
    factors, inputs = (Value(emit.permute(part, order), True) for part in (a, x))
    loop = Loop((step,), count=value(x).shape[1], initial=0 if initial is None else initial, scan=twin)
    loop.body = Affine(loop, factors, inputs)
    reroller.loops.append(loop)
    return twin


def _summed(reroller: Reroller, total: Any, wanted: Callable[[str], bool]) -> Rewrite | None:
    """Contract a cumulative sum: a recurrence without decay."""
    x, dim = total.args[:2]
    val = value(x)
    if val.dim() < MATRIX or not val.is_floating_point() or total.kwargs or val.shape[dim] < SHORTEST:
        return None
    return replace_reader(reroller, total, partial(_sum_again, x, dim % val.dim()), wanted, WHY)


def _sum_again(x: Node, dim: int, reroller: Reroller, total: Node) -> Node:
    """Emit a cumulative sum once more, with time after another axis, as a loop whose dual can be looked for."""
    emit, rank = reroller.emit, value(x).dim()
    others = [d for d in range(rank) if d != dim]
    order = [others[0], dim, *others[1:]]
    inputs = emit.permute(x, order)
    twin = emit.call(aten.cumsum.default, inputs, 1)
    step = emit.call(aten.select.int, twin, 1, 0)
    loop = Loop((step,), count=value(inputs).shape[1], initial=0, scan=twin)
    loop.body = Affine(loop, None, Value(emit.permute(inputs, [1, 0, *range(2, rank)]), True))
    reroller.loops.append(loop)
    return emit.permute(twin, [order.index(d) for d in range(rank)])


def _copied(loop: Any, reroller: Reroller, last: Node) -> Node:
    return reroller.emit.call(aten.clone.default, loop.last)
