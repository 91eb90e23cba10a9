"""The compile of one graph: find rewrites, prove them, apply those that stand, keep the fastest program."""

from __future__ import annotations

import copy
import functools
import logging
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, GraphModule, Node

from ..errors import RefoldWarning
from ..report import GraphReport, RewriteReport
from .dynamo.loop import lifted_loops
from .external_cumsum import keep_scans_external
from .inductor import Compiled, Hook, Stopped, bind, clone_inputs, duplicate, inductor
from .ir.cost import Cost, graph_cost
from .ir.evaluate import values_at
from .ir.rewrite import Rewrite
from .pipeline import run as run_pipeline
from .recurrence.vectorize import NotALoop
from .validate.program import Rewritten, first_line, last_word
from .validate.region import Settings, Verdict, judge, undisturbed_rng

log = logging.getLogger("refold")


@dataclass
class _Pending:
    """A graph whose rewrites are still to be judged."""

    index: int
    original: Graph
    rewritten: Graph
    rewrites: list[Rewrite]


class GraphCompile:
    """The compile of one graph."""

    def __init__(self, gm: GraphModule, inputs: Sequence[Any], settings: Settings, entry: GraphReport) -> None:
        self.gm, self.inputs, self.settings, self.entry = gm, inputs, settings, entry
        self.options = dict(settings.options or {})
        self.refused: set[str] = set()
        self.verdicts: dict[str, Verdict] = {}
        self.rows: dict[str, RewriteReport] = {}
        # How many sizes of cumulative sums are handed to ATen, and how many there are.
        self.external_scans, self.scan_sizes = 0, 0
        # The number of terms in the longest sum that was rewritten.
        self.terms = 1

    def run(self) -> Compiled:
        """Return the program that runs from now on, and fill the report."""
        start = time.perf_counter()
        given, saved = self.gm, self._roll_up_lifted()
        compiled = self._compile()
        self.entry.flops_before += saved.flops
        self.entry.bytes_before += saved.bytes
        self.entry.compile_s = time.perf_counter() - start - self.entry.proof_s
        self.entry.rewrites = list(self.rows.values())
        if compiled is None:
            self.entry.chosen = "eager"
            return given
        if not self.entry.applied and not self.external_scans:
            self.entry.chosen = "inductor"
            self.entry.reason = "no rewrite stands" if self.rows else ""
            return compiled
        self.entry.chosen = "refold"
        if self.entry.applied and (self.settings.verify != "off" or self.settings.accept == "faster"):
            start = time.perf_counter()
            rewritten = Rewritten(compiled, self._repeatable, self.terms)
            compiled = last_word(rewritten, given, self.inputs, self.settings, self.entry)
            self.entry.proof_s += time.perf_counter() - start
        log.info("graph %d: %s runs, %d rewrites", self.entry.index, self.entry.chosen, len(self.entry.applied))
        return compiled

    def _repeatable(self) -> Compiled:
        """Compile the graph again, with random numbers drawn as eager draws them."""
        self.options["fallback_random"] = True
        compiled = self._compile()
        if compiled is None:
            raise RuntimeError("Inductor cannot compile the graph with eager's random numbers")
        return compiled

    # Loops that were lifted --------------------------------------------------------------------

    def _roll_up_lifted(self) -> Cost:
        """Replace lifted loops by scans, where that stands; return what they cost more than their scans."""
        names = [call.name for call in lifted_loops(self.gm)]
        if not names:
            return Cost()
        from .dynamo.to_scan import serial

        self.gm = duplicate(self.gm)
        saved = Cost()
        for name in names:
            call = next(node for node in self.gm.graph.nodes if node.name == name)
            try:
                lowering = self._lowered(call)
            except NotALoop as reason:
                self.entry.notes.append(f"a loop over time stays: {reason} [{serial(self.gm, call)}]")
                continue
            if lowering is not None:
                lowering.splice()
                before, after = lowering.rewrite.before, lowering.rewrite.after
                saved += Cost(before.flops - after.flops, before.bytes - after.bytes)
        self.gm.recompile()
        return saved

    def _lowered(self, call: Node) -> Any:
        """Return a lifted loop as the scan that stands; None if none does."""
        from .dynamo.to_scan import Lowering

        for dual in (True, False):
            lowering = Lowering(self.gm, call, dual)
            rewrite = lowering.rewrite
            verdict = None
            if self.settings.verify != "off" or self.settings.accept != "always":
                start = time.perf_counter()
                verdict = self._verdict(rewrite)
                self.entry.proof_s += time.perf_counter() - start
            row = self.rows[f"lifted:{call.name}:{dual}"] = _row(rewrite, verdict)
            if verdict is None or not verdict.reason:
                row.status = "applied"
                self.terms = max(self.terms, rewrite.terms)
                return lowering
            row.status = "refused"
            if not lowering.dual:
                break  # else what does not write the states rounds too much, or is slower
        return None

    def _verdict(self, rewrite: Rewrite) -> Verdict:
        """Judge the rewrite of a lifted loop on the values that it gets from the user's inputs."""
        if rewrite.signature not in self.verdicts:
            with undisturbed_rng():
                found = values_at(self.gm.graph, rewrite.inputs, clone_inputs(self.inputs))
                actual = [found[name] for name in rewrite.inputs]
                self.verdicts[rewrite.signature] = judge(rewrite, actual, self.settings)
        return self.verdicts[rewrite.signature]

    # Finding and proving rewrites ------------------------------------------------------------

    def _compile(self) -> Compiled | None:
        """Start Inductor until every rewrite it sees has been judged; None if it cannot compile the graph."""
        while True:
            pending: list[_Pending] = []
            hook = Hook(functools.partial(self._visit, pending))
            log.info("compiling")
            try:
                return inductor(self.gm, self.inputs, hook=hook, options=self.options)
            except Exception as error:
                if hook.error is not None:
                    raise hook.error from None
                if not hook.stopped:
                    if not self._recover(error):
                        return None
                    continue
            start = time.perf_counter()
            for found in pending:
                self._judge(found)
            self.entry.proof_s += time.perf_counter() - start

    def _visit(self, pending: list[_Pending], index: int, graph: Graph) -> None:
        """Rewrite one ATen graph in place, or stop the compile to judge what is new."""
        if any(str(node.target).startswith("tangents") for node in graph.find_nodes(op="placeholder")):
            self.entry.mode = "training"
        if index == 0:
            self.entry.flops_before = self.entry.flops_after = self.entry.bytes_before = self.entry.bytes_after = 0
        before = graph_cost(graph.nodes)
        original = _copy(graph)
        rewrites = run_pipeline(graph, lambda site: f"{index}:{site}" not in self.refused)
        for rewrite in rewrites:
            self.rows[f"{index}:{rewrite.site}"] = _row(rewrite, self.verdicts.get(rewrite.signature))
        proofless = self.settings.verify == "off" and self.settings.accept == "always"
        if not proofless and any(rewrite.signature not in self.verdicts for rewrite in rewrites):
            pending.append(_Pending(index, original, graph, rewrites))
            raise Stopped
        for rewrite in rewrites:
            self.rows[f"{index}:{rewrite.site}"].status = "applied"
            self.terms = max(self.terms, rewrite.terms)
        after = graph_cost(graph.nodes) if rewrites else before
        self.entry.flops_before += before.flops
        self.entry.flops_after += after.flops
        self.entry.bytes_before += before.bytes
        self.entry.bytes_after += after.bytes
        self.scan_sizes = max(self.scan_sizes, keep_scans_external(graph, self.external_scans))

    def _judge(self, found: _Pending) -> None:
        """Judge rewrites not seen before, on values from the user's own inputs where possible."""
        index, rewrites = found.index, found.rewrites
        fresh = list({r.signature: r for r in rewrites if r.signature not in self.verdicts}.values())
        values: dict[str, Any] = {}
        if (bound := bind(found.original, self.inputs)) is not None:
            names = {name for r in fresh for name in r.inputs}
            # A region may read what an earlier rewrite of the same run made.
            for graph in (found.original, found.rewritten):
                with undisturbed_rng():
                    values |= values_at(graph, sorted(names - values.keys()), bound)
        else:
            self.entry.notes.append("the graph's inputs could not be matched: rewrites were proven on random ones only")
        for rewrite in fresh:
            actual = [values[name] for name in rewrite.inputs] if values.keys() >= set(rewrite.inputs) else None
            with undisturbed_rng():
                self.verdicts[rewrite.signature] = judge(rewrite, actual, self.settings)
        for rewrite in rewrites:
            verdict = self.verdicts[rewrite.signature]
            site = f"{index}:{rewrite.site}"
            self.rows[site] = _row(rewrite, verdict)
            if verdict.reason:
                self.rows[site].status = "refused"
                self.refused.add(site)

    def _recover(self, error: Exception) -> bool:
        """After Inductor failed: tell whether another attempt is worth it."""
        text = first_line(error)
        if self.external_scans < self.scan_sizes:
            self.external_scans += 1
            note = f"Inductor failed ({text}); cumulative sums are handed to ATen, smallest first, until it compiles"
            if note not in self.entry.notes:
                self.entry.notes.append(note)
            return True
        if self.settings.strict:
            raise error
        warnings.warn(f"Inductor failed on this graph ({text}); it runs eagerly", RefoldWarning, stacklevel=2)
        self.entry.notes.append(f"Inductor failed ({text}); the graph runs eagerly")
        return False


def _copy(graph: Graph) -> Graph:
    twin = copy.deepcopy(graph)
    twin.owning_module = graph.owning_module
    return twin


def _row(rewrite: Rewrite, verdict: Verdict | None) -> RewriteReport:
    row = RewriteReport(
        name=rewrite.name,
        site=rewrite.site,
        source=rewrite.source,
        why=rewrite.why,
        detail=rewrite.detail,
        flops_before=rewrite.before.flops,
        flops_after=rewrite.after.flops,
        bytes_before=rewrite.before.bytes,
        bytes_after=rewrite.after.bytes,
        largest_before=rewrite.before.largest,
        largest_after=rewrite.after.largest,
    )
    if verdict is not None:
        row.reason = verdict.reason
        if verdict.evidence is not None:
            row.errors = [vars(kind) for kind in verdict.evidence.kinds]
        if verdict.race is not None:
            row.original_ms, row.candidate_ms = verdict.race.base_ms, verdict.race.candidate_ms
            row.original_by = verdict.original_by
            row.speedup, row.at_least = verdict.race.speedup, verdict.race.at_least
    return row


def lower_lifted(entry: GraphReport, gm: GraphModule) -> GraphModule:
    """Write into a report what would become of lifted loops; return the graph without those that would be scans."""
    gm = duplicate(gm)
    for call in lifted_loops(gm):
        from .dynamo.to_scan import Lowering, serial

        loop = serial(gm, call)
        try:
            lowering = Lowering(gm, call)
        except NotALoop:
            continue  # it is found again, and described, when it is unrolled
        entry.loops.append(loop)
        entry.rewrites.append(_row(lowering.rewrite, None))
        lowering.splice()
    gm.recompile()
    return gm


def survey(entry: GraphReport, graph: Graph) -> None:
    """Write into a report what the pipeline would do with a graph; edits the graph."""
    before = graph_cost(graph.nodes)
    entry.rewrites += [_row(rewrite, None) for rewrite in run_pipeline(graph)]
    after = graph_cost(graph.nodes)
    entry.flops_before, entry.flops_after = before.flops, after.flops
    entry.bytes_before, entry.bytes_after = before.bytes, after.bytes
