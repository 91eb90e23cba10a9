"""Let scans that loops became run in 16 bits, if they were widened from 16 bits and all that they give becomes 16 bits.

A loop over time widens its inputs to float32, and narrows its results. The scan that it becomes has float32 arguments
then. `refold.compiler.recurrence.narrowing` says what is replaced, and how it is decided. The user's own calls of
operators keep the dtype that they are written in.

Shapes are those of the region, and stay; dtypes change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import getitem

from torch.fx import Graph, Node

from ..ir.fx import concrete, is_made, is_training, known, value
from ..ir.rewrite import Rewrite
from ..recurrence.narrowing import NARROWED, narrow_after


def narrow_scans(graph: Graph, wanted: Callable[[str], bool]) -> Iterator[Rewrite]:
    """Replace each scan that a loop became by the same scan in 16 bits, where that is possible."""
    if is_training(graph):
        return
    scans = [node for target in NARROWED for node in graph.find_nodes(op="call_function", target=target)]
    for scan in filter(is_made, scans):
        results = {user.args[1]: user for user in scan.users if user.target is getitem}
        if list(results) == [0] and (rewrite := _narrowed(scan, results[0], wanted)) is not None:
            yield rewrite
            graph.eliminate_dead_code()


def _narrowed(scan: Node, y: Node, wanted: Callable[[str], bool]) -> Rewrite | None:
    tokens = known(value(y).shape[1])
    many = f"{tokens} tokens" if isinstance(tokens, int) else "any number of tokens"
    return narrow_after(
        y, y, (), wanted, name="narrow scan", why="what is read and written was widened to float32",
        detail=f"{many} in one {NARROWED[scan.target].name}", terms=concrete(tokens),
    )  # fmt: skip
