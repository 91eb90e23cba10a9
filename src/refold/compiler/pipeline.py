"""The compiler, on one screen: named passes in the order in which they run.

To see what each pass does to a graph, set the logger ``refold.graphs`` to ``DEBUG``, or the environment variable
``REFOLD_LOG_GRAPHS`` to 1. With ``REFOLD_CHECK_GRAPHS=1``, as in the tests, the invariants of
`refold.compiler.ir.invariants` are checked after every pass that changed something.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from torch.fx import Graph

from .ir.fx import only_a_run_knows
from .ir.invariants import check_invariants
from .ir.rewrite import Rewrite
from .notation.rules import Rule, apply_rules
from .passes.absorb_skips import absorb_skips
from .passes.contract_scans import contract_scans
from .passes.difference_segment_sums import difference_segment_sums
from .passes.fuse_chunked_deltas import fuse_chunked_deltas
from .passes.fuse_chunked_scans import contract_last_states, fuse_chunked_scans, linearize_attention
from .passes.merge_products import merge_products
from .passes.multiply_out import multiply_out
from .passes.narrow_scans import narrow_scans
from .passes.prefer_onednn import prefer_onednn
from .passes.recover_contractions import drop_degenerate_sums, recover_contractions
from .passes.replace_causal_convolutions import replace_causal_convolutions
from .passes.replace_gated_norms import replace_gated_norms
from .passes.replace_prefix_networks import replace_prefix_networks
from .passes.replace_rescaled_sums import replace_rescaled_sums
from .passes.reroll_loops import reroll_loops
from .passes.sum_convolutions import sum_convolutions
from .passes.unroll_depthwise_convolutions import unroll_depthwise_convolutions
from .refusals import Refusal

log = logging.getLogger("refold.graphs")

LOG = "REFOLD_LOG_GRAPHS"
CHECK = "REFOLD_CHECK_GRAPHS"
"""Environment variables, read when the passes run."""


class Stage(Enum):
    """When a graph is rewritten."""

    CAPTURED = "captured"
    """Loops that Dynamo captured become scans."""
    FORWARD = "forward"
    """Before autograd: code whose backward is not there yet; see `refold.compiler.dynamo.before_autograd`."""
    JOINT = "joint"
    """The ATen graph that Inductor gets, with its backward if it has one."""


class Pass(NamedTuple):
    """A function that rewrites a graph, and where it runs."""

    name: str
    apply: Callable[[Graph, Callable[[str], bool]], Iterator[Rewrite | Refusal | str]]
    stages: frozenset[Stage] = frozenset({Stage.JOINT})


_FORWARD = frozenset({Stage.FORWARD})
_BOTH = frozenset({Stage.FORWARD, Stage.JOINT})

PASSES: list[Pass] = [
    Pass("replace prefix networks", replace_prefix_networks, _BOTH),
    Pass("replace rescaled sums", replace_rescaled_sums, _BOTH),
    Pass("fuse chunked delta rules", fuse_chunked_deltas, _BOTH),
    Pass("roll up loops", reroll_loops),
    Pass("contract scans", contract_scans, _BOTH),
    Pass("fuse chunked scans", fuse_chunked_scans, _BOTH),
    Pass("linearize attention", linearize_attention, _BOTH),
    Pass("contract last states", contract_last_states, _BOTH),
    Pass("narrow scans", narrow_scans, _BOTH),
    Pass("absorb skips", absorb_skips, _BOTH),
    Pass("replace causal convolutions", replace_causal_convolutions, _FORWARD),
    Pass("replace gated norms", replace_gated_norms, _FORWARD),
    Pass("drop degenerate sums", drop_degenerate_sums),
    Pass("sum a convolution's input", sum_convolutions),
    Pass("multiply out", multiply_out),
    Pass("recover contractions", recover_contractions),
    Pass("merge products", merge_products),
    Pass("unroll depthwise convolutions", unroll_depthwise_convolutions, _BOTH),
    Pass("difference segment sums", difference_segment_sums),
    Pass("prefer oneDNN", prefer_onednn),
]


def passes_of(stage: Stage, names: Sequence[str] | None = None) -> list[Pass]:
    """Return the passes of a stage; those with these names, in their order, if names are given."""
    table = {one.name: one for one in PASSES if stage in one.stages}
    return [table[name] for name in (table if names is None else names)]


NAMES = tuple(one.name for one in passes_of(Stage.JOINT))

# The search for rewrites of one graph may take this much of the CPU; after that nothing more is looked at.
SEARCH_S = 5.0


def run(
    graph: Graph, wanted: Callable[[str], bool] = lambda _: True, notes: list[str] | None = None,
    passes: Sequence[Pass] | None = None, seen: Callable[[Rewrite], None] = lambda _: None, rules: Sequence[Rule] = (),
) -> list[Rewrite]:  # fmt: skip
    """Run passes over a graph, in place.

    Args:
        graph: An ATen graph with fake values in its metadata.
        wanted: Which sites (node names) may be rewritten.
        notes: Gets a sentence for what a pass found and may not replace, for a rule that does not fit, and if the time
            for the search was over before its end.
        passes: The passes; all of a joint graph unless given.
        seen: Called with each rewrite as it is made, before the next one.
        rules: Rewrites that others found; before the passes.

    Returns:
        What was changed, in order.
    """
    if only_a_run_knows(graph):
        if notes is not None:
            notes.append("nothing was looked for in a graph with sizes that only a run knows")
        return []
    deadline, missed, said = time.thread_time() + SEARCH_S, set[str](), list[str]()

    def in_time(site: str) -> bool:
        if time.thread_time() > deadline:
            missed.add(site)
        return site not in missed and wanted(site)

    rewrites: list[Rewrite] = []
    _dump("as it was", graph)
    first = [Pass("apply rules", lambda graph, wanted: apply_rules(graph, wanted, rules, said))] if rules else []
    for name, apply, _ in (*first, *(passes_of(Stage.JOINT) if passes is None else passes)):
        before = len(rewrites)
        for found in apply(graph, in_time):
            if not isinstance(found, Rewrite):
                said.append(found if isinstance(found, str) else found.advice)
                continue
            seen(found)
            rewrites.append(found)
        if len(rewrites) > before:
            _dump(f'after "{name}"', graph)
            if os.environ.get(CHECK) == "1":
                check_invariants(graph, name)
    if rewrites:
        graph.eliminate_dead_code()
        graph.lint()
    if notes is not None:
        notes += said
    if missed and notes is not None:
        notes.append(
            f"the search for rewrites ended after {SEARCH_S:.0f} s: {len(missed)} places in a graph of "
            f"{len(graph.nodes)} operations were not searched"
        )
    return rewrites


def _dump(when: str, graph: Graph) -> None:
    """Print a graph to the logger, or to standard error if the environment asks for it."""
    wanted = os.environ.get(LOG) == "1"
    if not wanted and not log.isEnabledFor(logging.DEBUG):
        return
    text = f"graph {when}:\n{graph.python_code('self', verbose=True).src}"
    if wanted:
        sys.stderr.write(f"[refold.graphs] {text}\n")
    else:
        log.debug(text)
