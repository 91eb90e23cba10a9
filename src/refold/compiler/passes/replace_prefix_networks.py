"""Turn linear recurrences that are computed as parallel prefix networks into scans.

PyTorch's ``associative_scan``, and scans by doubling or by trees that people write themselves, combine neighbours in
time, in passes over all of memory. `refold.compiler.recurrence.prefix` reads what they compute.

Shapes. Values are (..., t, ...), and stay so. Sources: as there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch.fx import Graph, Node

from ..ir.fx import is_training
from ..ir.rewrite import Rewrite
from ..recurrence.prefix import recurrences
from ..recurrence.scanned import scanned

NAME = "replace prefix network"
WHY = "its states are combined pair by pair, in passes over all of memory"


def replace_prefix_networks(graph: Graph, wanted: Callable[[str], bool]) -> Iterator[Rewrite]:
    """Replace values (..., t, ...) that are recurrences along an axis by ``linear_scan``."""
    if is_training(graph):
        return  # the backward reads what the network computes on its way
    done, replaced = set[object](), dict[Node, Node]()
    for found in recurrences(list(graph.nodes)):
        what = (found.a, found.exponent, found.b, found.reverse)
        if what in done or not found.node.users:
            continue
        done.add(what)
        if wanted(found.node.name) and (made := scanned(found, NAME, WHY, replaced)) is not None:
            yield made
    if replaced:
        graph.eliminate_dead_code()  # what is left of a network reads the states, which later passes take for a reader
