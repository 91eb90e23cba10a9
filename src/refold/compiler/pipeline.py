"""The compiler, on one screen: named passes in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch.fx import Graph

from .ir.rewrite import Rewrite
from .passes.contract_scans import contract_scans
from .passes.difference_segment_sums import difference_segment_sums
from .passes.fuse_chunked_scans import contract_last_states, fuse_chunked_scans
from .passes.prefer_onednn import prefer_onednn
from .passes.recover_contractions import drop_degenerate_sums, recover_contractions
from .passes.reroll_loops import roll_up_loops
from .passes.unroll_depthwise_convolutions import unroll_depthwise_convolutions

Pass = Callable[[Graph, Callable[[str], bool]], Iterator[Rewrite]]

PASSES: list[tuple[str, Pass]] = [
    ("roll up loops", roll_up_loops),
    ("contract scans", contract_scans),
    ("fuse chunked scans", fuse_chunked_scans),
    ("contract last states", contract_last_states),
    ("drop degenerate sums", drop_degenerate_sums),
    ("recover contractions", recover_contractions),
    ("unroll depthwise convolutions", unroll_depthwise_convolutions),
    ("difference segment sums", difference_segment_sums),
    ("prefer oneDNN", prefer_onednn),
]


def run(graph: Graph, wanted: Callable[[str], bool] = lambda _: True) -> list[Rewrite]:
    """Run every pass over a graph, in place.

    Args:
        graph: An ATen graph with fake values in its metadata.
        wanted: Which sites (node names) may be rewritten.

    Returns:
        What was changed, in order.
    """
    rewrites = [rewrite for _, apply in PASSES for rewrite in apply(graph, wanted)]
    if rewrites:
        graph.eliminate_dead_code()
        graph.lint()
    return rewrites
