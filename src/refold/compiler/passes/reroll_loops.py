"""Turn unrolled loops over time into scans.

A loop is found where its steps come together again. That is a ``cat`` of one value per step, a tensor that each step
writes a slice of, or a sum over steps (gradients of what all steps read). It may also be the last state. From there
`refold.compiler.recurrence.reroll` works backwards. What carries no state from step to step is left to Inductor.

Shapes. The steps' values (...) become one value (t, ...), and are joined as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch.fx import Graph

from ..ir.builder import sort_topologically
from ..ir.fx import is_erased, is_training
from ..ir.rewrite import Rewrite
from ..ir.source import source_line
from ..recurrence.joins import SHORTEST, chains, joins, last_states, replace_end
from ..recurrence.replace import replace, replace_reader
from ..recurrence.reroll import Reroller
from ..recurrence.scatters import forward_writes
from ..recurrence.serial_chains import steps_in_time
from ..recurrence.vectorize import NotALoop

STAYS = "a loop over time is not rewritten:"
"""How a note begins that says why a loop is no scan."""


def reroll_loops(graph: Graph, wanted: Callable[[str], bool]) -> Iterator[Rewrite | str]:
    """Replace loops whose carry enters affinely and elementwise by ``linear_scan``; say why others stay."""
    if len(graph.nodes) < 2 * SHORTEST:
        return
    forward_writes(graph)
    # A backward needs the states, so forward and backward are scans that share them.
    training = is_training(graph)
    reroller, changed = Reroller(training), False
    reasons: dict[str, None] = {}
    for root, join in joins(graph):
        if not wanted(root.name):
            continue
        try:
            rewrite = replace_reader(reroller, root, join, wanted) or replace(reroller, root, join)
        except NotALoop as reason:
            reasons[reason.told_of(source_line(root))] = None
            continue
        if rewrite is not None:
            changed = True
            yield rewrite
    for root, join, after in last_states(graph, reroller):
        if wanted(root.name) and (rewrite := replace(reroller, root, join, after)) is not None:
            yield rewrite
            sort_topologically(graph)
    rerollers = [reroller]
    for steps in chains(graph, reroller.members):
        if wanted(steps[-1].name):
            rerollers.append(Reroller(training))  # of its own: what the others made may stand after this end
            try:
                rewrite = replace_end(rerollers[-1], steps)
            except NotALoop as reason:
                reasons[reason.told_of(source_line(steps[-1]))] = None
                continue
            if rewrite is not None:
                reroller.members |= rerollers[-1].members
                changed = True
                yield rewrite
    for node in (node for each in rerollers for node in reversed(each.emit.added)):
        if not node.users and node.graph is graph and not is_erased(node):
            graph.erase_node(node)
    if changed:
        graph.eliminate_dead_code()
    if reasons and steps_in_time(graph):
        yield from (f"{STAYS} {reason}" for reason in reasons)
