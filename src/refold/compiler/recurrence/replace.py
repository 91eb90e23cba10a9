"""Put a scan, or an operator that never writes the states, where the steps of a loop were.

Shapes. States of all steps are (t, ...); the operator computes (b, t, ...). What takes their place has the shape and
the strides of what was there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from ..ir.builder import Builder, downstream, region_inputs, sort_topologically, upstream, walk
from ..ir.fx import CONVERT, RESHAPES, concrete, is_zero, value
from ..ir.metadata import refresh
from ..ir.operators import CONTRACTED, HEADS, RANK_ONE, SCAN
from ..ir.rewrite import Rewrite, replace_node
from ..ir.views import is_view
from .affine import Loop
from .forms import match_form
from .readout import ScanStates, find_readout
from .reroll import Reroller
from .states import LoopVectorizer

aten = torch.ops.aten

SCANS = {scan.target for scan in (SCAN, CONTRACTED, HEADS, RANK_ONE)}
_CONTRACTIONS = (aten.sum.dim_IntList, aten.bmm.default)

Join = Callable[[Reroller, Node], Node]
WHY = "its steps run one after another, each operation in a launch of its own"


def replace_reader(
    reroller: Reroller, root: Node, join: Join, wanted: Callable[[str], bool], why: str = WHY
) -> Rewrite | None:
    """Swap the one contraction that reads the states of all steps for an operator that never writes them."""
    found = None if reroller.training else _only_reader(root)
    if found is None or not wanted(found[0].name):
        return None
    reader, between = found

    def read(reroller: Reroller, _: Node) -> Node:
        copies = {root: join(reroller, root)}
        reroller.emit.at(reader)

        def copy(node: Any) -> Node:
            if node not in copies:
                args = map_arg(node.args, lambda x: copy(x) if x in between else x)
                if node.target in RESHAPES:  # the states may lie in memory otherwise
                    copies[node] = reroller.emit.reshape(args[0], value(node).shape)
                else:
                    copies[node] = reroller.emit.call(node.target, *args, **node.kwargs)
            return copies[node]

        return copy(reader)

    rewrite = replace(reroller, reader, read, dual=True, why=why)
    reroller.emit.settle()  # what stands before the reader may stand after the next root
    return rewrite


def _only_reader(root: Node) -> tuple[Node, set[Node]] | None:
    """Return the contraction that alone reads a value, and the nodes through which it does."""
    readers: set[Node] = set()
    between, stack = {root}, [root]
    while stack:
        for user in stack.pop().users:
            if user.target in _CONTRACTIONS:
                readers.add(user)
            elif user.op == "call_function" and (is_view(user) or user.target in (aten.mul.Tensor, CONVERT)):
                between.add(user)
                stack.append(user)
            else:
                return None
    return (readers.pop(), between) if len(readers) == 1 else None


def replace(
    reroller: Reroller, root: Node, join: Join, anchor: Node | None = None, dual: bool = False, why: str = WHY
) -> Rewrite | None:
    """Swap a root for its value over all steps; None if it comes of no loop, or no ``dual`` where one is asked for."""
    loops = len(reroller.loops)
    anchor = anchor or root
    reroller.emit.at(anchor)
    new = join(reroller, root)
    if not reroller.loops or not (dual or _scans(new)):
        return None
    for loop in [] if reroller.training else reroller.loops[loops:]:
        new = dualise(reroller, loop, new)
    if dual and all(loop.operator == SCAN.name for loop in reroller.loops[loops:]):
        return None
    build = Builder(anchor)
    new = build.restride(new, value(root))
    reroller.emit.added += build.added
    live = upstream(new)
    added = [node for node in reroller.emit.added if node in live]
    added += _computed_anew(added, reroller)
    inside = _region(root, added, reroller)
    found = reroller.loops[loops:] or reroller.loops[-1:]
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


def _computed_anew(added: list[Node], reroller: Reroller) -> set[Node]:
    """Return nodes of single steps that the new value reads, because all steps compute the same.

    Both versions of the region compute them: if they were inputs as well as what they are computed from, the check
    would draw values for them that contradict what the other steps compute.
    """
    members = reroller.members
    return set(walk(added, lambda x: members.intersection(x.all_input_nodes))) & members


def _region(root: Node, made: list[Node], reroller: Reroller) -> set[Node]:
    """Return the nodes of the original between what the new value reads and the root."""
    added = set(made)
    read = {x for node in added for x in node.all_input_nodes if x not in added}
    inside = reroller.members - read
    # The operators' arguments may be read from further up than the loop did, before a negation say.
    after: set[Node] = set()
    for node in root.graph.nodes:
        if any(x in read or x in after for x in node.all_input_nodes):
            after.add(node)
    above = after - read - added - inside
    return inside.union(
        walk(above.intersection(region_inputs(root, inside)), lambda x: above.intersection(x.all_input_nodes))
    )


def dualise(reroller: LoopVectorizer, loop: Loop, new: Node) -> Node:
    """Replace a scan whose states are only contracted by an operator that never writes them; returns what is new."""
    scan, body = loop.scan, loop.body
    if loop.reverse or scan is None or body is None or body.reset is not None:
        return new
    shape = [loop.length, *value(loop.steps[0]).shape]
    states = ScanStates(scan, loop.previous, shape, downstream(scan))
    for node in [n for n in upstream(new) if n.target in _CONTRACTIONS and n in states.dependent]:
        read = find_readout(reroller.emit, node, states)
        if read is None or len(shape) < 3:
            continue
        initial = loop.initial if isinstance(loop.initial, Node) else None
        if is_zero(initial):
            initial = None
        elif initial is not None:
            initial = reroller.emit.expand(initial, shape[1:])
        elif loop.initial != 0:
            continue
        found = None
        if read.summed != 1:
            found = match_form(reroller.emit, read, body.scale, body.offset, shape, initial)
        if found is None and (read.summed == 1 or len(shape) == 3):  # no axis of the state is a batch
            if initial is not None:
                initial = reroller.emit.call(aten.unsqueeze.default, initial, 0)
            shape = [shape[0], 1, *shape[1:]]
            found = match_form(reroller.emit, read.with_batch(), body.scale, body.offset, shape, initial)
            found = None if found is None else (found[0], reroller.emit.call(aten.squeeze.dim, found[1], 0))
        if found is None:
            continue
        y, last = found
        if value(y).shape != value(node).shape:
            continue
        readers = list(node.users)
        node.replace_all_uses_with(y)
        reroller.emit.settle()
        result = y if node is new else new
        if scan in upstream(result):  # its states are used otherwise, too
            y.replace_all_uses_with(node)
            continue
        loop.last = reroller.emit.cast(last, value(loop.steps[0]).dtype)
        sort_topologically(new.graph)
        refresh(new.graph, readers, but=new if new.op == "output" else None)
        used = {n.target for n in upstream(y)}
        made = (scan.name for scan in (HEADS, CONTRACTED, RANK_ONE) if scan.target in used)
        loop.operator = next(made, f"{SCAN.name} over chunks")
        return result
    return new


def _scans(new: Node) -> bool:
    """Tell whether a value comes out of a scan."""
    return any(node.target in SCANS for node in upstream(new))
