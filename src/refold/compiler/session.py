"""The compile of one graph: find rewrites, check them, apply those that stand, keep the fastest program.

Design decision 5.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from ..errors import first_line, warn
from ..report import GraphReport, RewriteReport
from .compile_time import inductor_seconds, layer_seconds, unrolled_seconds
from .decisions import Store, digest, versions
from .dynamo.associative_scan import define_scans
from .dynamo.scan_operation import scans_as_loops
from .early_rewrites import EarlyRewrites
from .external_cumsum import keep_scans_external
from .inductor import (
    Compiled,
    Hook,
    Stopped,
    bind,
    duplicate,
    inductor_with,
    sums_are_external,
)
from .ir.cost import Cost, computing, graph_cost
from .ir.evaluate import values_at
from .ir.fx import copied_graph, is_made, loop_operation
from .ir.rewrite import Rewrite
from .options import Options
from .passes.reroll_loops import STAYS
from .pipeline import run as run_pipeline
from .private import TraceAgain
from .record import Decided, Judgements, Record, no_verdict, row_of
from .recurrence.serial_chains import unrolled_operations
from .refusals import refused
from .validate.program import Outcome, Rewritten, Rival, choose_program, compared, left_eager
from .validate.region import Judgement, undisturbed_rng

log = logging.getLogger("refold")

# Inductor lets threads share a loop of 512 elements each, which is less work than to wake a thread. Where another
# program wants the cores, each such loop waits for it: seven loops of 2 threads took 770 ms in place of 0.2.
SHARES = {"cpp.min_chunk_size": 4096}


@dataclass
class _Pending:
    """A graph whose rewrites are still to be judged."""

    index: int
    original: Graph
    rewritten: Graph
    rewrites: list[Rewrite]


class TooLong(Exception):
    """Inductor would take longer for an unrolled loop than it may; the message says how long."""


class GraphCompile:
    """The compile of one graph: find rewrites, judge them, take the fastest program.

    Args:
        report: What is known of the graph: its place, its name, whether it has a backward.
        decided: What was decided of its rewrites; None if that is to be found out.
        earlier: The compile whose rewrites lost the race together. What it found out holds; each region is now timed
            alone.
        lost: Rewrites (pass, line) that are known to lose the race.
    """

    def __init__(
        self, gm: GraphModule, inputs: Sequence[Any], options: Options, report: GraphReport, store: Store, *,
        decided: Decided | None = None, earlier: GraphCompile | None = None, lost: Set[tuple[str, str]] = frozenset(),
    ) -> None:  # fmt: skip
        self.inputs, self.options, self.start = inputs, options, report
        self.mode, self.notes, self.checks_s = report.mode, list(report.notes), 0.0
        self.given = define_scans(scans_as_loops(gm, self.notes), everywhere=self.mode == "training")
        self.gm = define_scans(self.given, everywhere=True)
        self.rival: Rival = Rival(self.given, inputs, options) if earlier is None else earlier.rival
        # What Inductor compiles the rewritten graph with.
        self.inductor = {**options.inductor, **options.choose.inductor}
        self.record = Record(options, decided)
        self.judgements: Judgements = Judgements(
            options, store, self.notes, None if earlier is None else earlier.judgements, lost
        )
        # How many sizes of cumulative sums are handed to ATen, and how many there are.
        self.external_scans, self.scan_sizes = 0 if decided is None else decided.external_scans, 0
        # What the graphs that Inductor was shown cost, before and after.
        self.before, self.after = Cost(), Cost()
        # How many operations of the original Inductor would generate code for, backward included, and how many fewer it
        # sees because of what was rewritten before autograd.
        self.operations, self.operations_saved = 0, 0
        # Whether AOTAutograd's cache is asked; whether the last compile showed its graph; whether Inductor failed.
        self.cached, self.seen, self.failed = True, False, False

    @property
    def rows(self) -> dict[str, RewriteReport]:
        """What is known of each rewrite, by its key."""
        return self.record.rows

    def run(self) -> Outcome:
        """Return the program that runs from now on, and what was found out."""
        start = time.perf_counter()
        defined = self.gm is not self.given
        saved = self.rewrite_before_autograd()
        try:
            compiled = self.built()
            if defined and not self.record.applied:  # Inductor has code of its own for PyTorch's scans
                self.gm = self.given
                compiled = self.built()
        except TooLong as reason:
            return self._left_eager(reason)
        report = replace(
            self._report(self.before + saved, self.after), compile_s=time.perf_counter() - start - self.checks_s
        )
        if compiled is None:
            return Outcome(self.given, replace(report, chosen="eager"))
        if not report.applied and not self.external_scans:
            return self._as_given(compiled, report)
        outcome = Outcome(compiled, replace(report, chosen="refold"))
        if report.applied and (self.options.verify != "off" or self.options.accept == "faster"):
            outcome = self.last_word(*outcome)
        report = outcome.report
        log.info("graph %d: %s runs, %d rewrites", report.index, report.runs, len(report.applied))
        return Outcome(outcome.program, self._with_load(report))

    def _report(self, before: Cost, after: Cost) -> GraphReport:
        """Report what is known by now."""
        return replace(
            self.start,
            mode=self.mode,
            rewrites=tuple(self.rows.values()),
            notes=tuple(self.notes),
            flops_before=before.flops,
            bytes_before=before.bytes,
            flops_after=after.flops,
            bytes_after=after.bytes,
            checks_s=self.checks_s,
            external_scans=self.external_scans,
        )

    def _with_load(self, report: GraphReport) -> GraphReport:
        """Say how the machine was busy when rewrites were timed alone, and whether that left something open."""
        races = [verdict.race for verdict in self.judgements.found.values() if verdict.race is not None]
        busy = report.busy or next((race.busy for race in races if race.busy), "")
        hurried = any(verdict.hurried for verdict in self.judgements.found.values())
        return replace(report, busy=busy, provisional=report.provisional or hurried)

    def built(self) -> Compiled | None:
        """Compile the graph, unless that takes too long; None if Inductor cannot.

        Raises:
            TooLong: It would.
        """
        _check_time(unrolled_seconds(self.gm, self.mode), self.options)
        return self._compile()

    def _left_eager(self, reason: TooLong) -> Outcome:
        """Let the graph run eagerly, with scans for those of its loops that are some."""
        why = refused("too-long", str(reason))
        for key, row in self.rows.items():
            if not key.startswith(("captured:", "forward:")) and row.status != "refused":
                self.rows[key] = row.refused(why)
        applied = self.record.applied
        before = Cost(sum(row.flops_before for row in applied), sum(row.bytes_before for row in applied))
        after = Cost(sum(row.flops_after for row in applied), sum(row.bytes_after for row in applied))
        report = self._report(before, after).saying(f"the graph runs eagerly: {why}")
        report = replace(report, chosen="refold" if applied else "eager", reason=f"because {reason}")
        log.warning("refold: graph %d runs eagerly: %s", report.index, reason)
        return self.last_word(self.gm, report, lambda: self.gm) if applied else Outcome(self.given, report)

    def _as_given(self, compiled: Compiled, report: GraphReport) -> Outcome:
        """Take Inductor's program of a graph that nothing rewrites, unless it is one that Inductor gets wrong.

        Only PyTorch's own loops are looked at.
        """
        why = "every rewrite that was tried was refused" if self.rows else ""
        report = self._with_load(replace(report, chosen="inductor", reason=why))
        kinds = [name for node in self.given.graph.nodes if (name := loop_operation(node))]
        if not kinds or self.options.verify == "off":
            return Outcome(compiled, report)
        start = time.perf_counter()
        left = Rewritten(compiled, self._repeatable, self.record.terms, self.gm, 0.0)
        try:
            report, reason = compared(left, self.given, {"eager": self.given}, self.inputs, self.options, report)
        except Exception as error:  # of Inductor's program, or of eager's: neither has a common type
            reason = ""
            report = report.saying(f"Inductor's program of `{kinds[0]}` was not checked: {first_line(error)}")
        report = replace(report, checks_s=report.checks_s + time.perf_counter() - start)
        if not reason:
            return Outcome(compiled, report)
        wrong = f"Inductor's program of PyTorch's `{kinds[0]}` {reason}"
        warn(f"{wrong}; the graph runs eagerly")
        return Outcome(self.given, replace(report, chosen="eager", reason=f"because {wrong}"))

    def last_word(
        self, compiled: Compiled, report: GraphReport, repeatable: Callable[[], Compiled] | None = None
    ) -> Outcome:
        """Check the whole graph, and race it if that is wanted."""
        start, known = time.perf_counter(), self.rival.seconds or 0.0
        seconds = layer_seconds(self.operations)
        rewritten = Rewritten(compiled, repeatable or self._repeatable, self.record.terms, self.gm, seconds)
        program, report = choose_program(rewritten, self.given, self.inputs, self.options, report, self.rival)
        # What it took to compile the original is told apart.
        spent = time.perf_counter() - start - ((self.rival.seconds or 0.0) - known)
        return Outcome(program, replace(report, checks_s=report.checks_s + spent))

    def _repeatable(self) -> Compiled:
        """Compile the graph again, with random numbers drawn as eager draws them."""
        self.inductor["fallback_random"] = True
        compiled = self._compile()
        if compiled is None:
            raise RuntimeError("Inductor cannot compile the graph with eager's random numbers")
        return compiled

    def rewrite_before_autograd(self) -> Cost:
        """Replace what is rewritten before autograd; return what that saves."""
        early = EarlyRewrites(self.gm, self.inputs, self.options, self.mode, self.record, self._verdict, self.notes)
        saved = early.rewrite()
        self.gm, self.operations_saved = early.gm, early.operations_saved
        self.checks_s += early.checks_s
        return saved

    def _compile(self) -> Compiled | None:
        """Start Inductor until every rewrite it sees has been judged; None if it cannot compile the graph."""
        while True:
            pending: list[_Pending] = []
            facts = [repr(self.options.choose), *(rule.digest for rule in self.options.rules)]
            facts += [node.name for node in self.gm.graph.nodes if is_made(node)]  # they are treated otherwise
            outcome = digest([*versions(), *facts, *sorted(self.record.refused), str(self.external_scans)])
            hook = Hook(functools.partial(self._visit, pending), outcome, self.cached, self.notes)
            log.info("compiling graph %d", self.start.index)
            try:
                rewritten = self.record.unjudged or any(not each.reason for each in self.judgements.found.values())
                if self.record.decided is not None:
                    rewritten = bool(self.record.decided.rows)
                options = {**SHARES, **self.inductor} if rewritten else self.inductor
                compiled = inductor_with(self.gm, self.inputs, hook, options)
            except TraceAgain:
                raise
            except Exception as error:
                if hook.error is not None:
                    raise hook.error from None
                if not hook.stopped and not self._recover(error):
                    self.failed = True
                    return None
            else:
                self.seen = hook.count > 0
                if self.seen or self.record.known:
                    return compiled
                self.cached = False  # the cache answered, and what was rewritten is not known
                continue
            start = time.perf_counter()
            for found in pending:
                self._judge(found)
            self.checks_s += time.perf_counter() - start
            self.cached = bool(pending)

    def _visit(self, pending: list[_Pending], index: int, graph: Graph) -> None:
        """Rewrite one ATen graph in place, or stop the compile to judge what is new."""
        if any(str(node.target).startswith("tangents") for node in graph.find_nodes(op="placeholder")):
            self.mode = "training"
        if index == 0:
            self.before = self.after = Cost()
            self.operations = self.operations_saved
        self.operations += computing(graph.nodes)
        before = graph_cost(graph.nodes)
        original = copied_graph(graph)
        notes: list[str] = []
        rewrites = self.options.rewrite(graph, lambda site: self.record.wants(f"{index}:{site}"), notes)
        self.notes += _untold(self.notes, notes)
        # All rewrites are in the graph, also those that are still to be judged: without them it is longer.
        if inductor_seconds(len(graph.nodes)) > self.options.compile_budget:
            _check_time(inductor_seconds(unrolled_operations(graph)), self.options)
        verdicts = [self.judgements.found.get(rewrite.signature) for rewrite in rewrites]
        asked = [verdict for rewrite, verdict in zip(rewrites, verdicts, strict=True) if self.record.asks(rewrite)]
        if any(verdict is None or verdict.reason for verdict in asked):
            pending.append(_Pending(index, original, graph, rewrites))
            raise Stopped
        for rewrite, verdict in zip(rewrites, verdicts, strict=True):
            self.record.note(f"{index}:{rewrite.site}", rewrite, verdict)
            self.record.apply(f"{index}:{rewrite.site}", rewrite)
        self.before += before
        self.after += graph_cost(graph.nodes) if rewrites else before
        self.scan_sizes = max(self.scan_sizes, keep_scans_external(graph, self.external_scans))

    def _verdict(self, rewrite: Rewrite, actual: Callable[[], Sequence[Any] | None]) -> Judgement | None:
        """Judge a rewrite; None if it is made without a verdict."""
        return self.judgements.of(rewrite, actual) if self.record.asks(rewrite) else None

    def _judge(self, found: _Pending) -> None:
        """Judge rewrites not seen before, on values from the user's own inputs where possible."""
        index, rewrites, values = found.index, found.rewrites, dict[str, Any]()
        if (bound := bind(found.original, self.inputs)) is not None:
            names = {name for r in rewrites if r.signature not in self.judgements.found for name in r.inputs}
            # A region may read what an earlier rewrite of the same run made.
            for graph in (found.original, found.rewritten):
                with undisturbed_rng():
                    values |= values_at(graph, sorted(names - values.keys()), bound)
        else:
            self.notes.append("the graph's inputs could not be matched: rewrites were checked on random ones")

        def actual(rewrite: Rewrite) -> list[Any] | None:
            return [values[name] for name in rewrite.inputs] if values.keys() >= set(rewrite.inputs) else None

        for rewrite in rewrites:
            verdict = self._verdict(rewrite, functools.partial(actual, rewrite))
            self.record.note(f"{index}:{rewrite.site}", rewrite, verdict)

    def lost_together(self, report: GraphReport) -> bool:
        """Tell whether rewrites lost the race of the whole graph that may be faster without some of the others."""
        stood = [verdict.postponed for verdict in self.judgements.found.values() if not verdict.reason]
        others = len(stood) > 1 or any(key.startswith("captured:") for key in self.rows)
        return report.chosen != "refold" and report.speedup is not None and any(stood) and others

    def _recover(self, error: Exception) -> bool:
        """After Inductor failed: tell whether another attempt is worth it."""
        if self.external_scans < self.scan_sizes:
            self.external_scans += 1
            if (note := sums_are_external(error)) not in self.notes:
                self.notes.append(note)
            return True
        self.notes.append(left_eager(error, self.gm, self.options, self.start))
        return False


def _check_time(seconds: float, options: Options) -> None:
    """Raise if Inductor would take longer for unrolled loops than it may."""
    if seconds > (budget := options.compile_budget):
        raise TooLong(
            f"Inductor would take about {seconds:.0f} s to compile an unrolled loop; compile_budget is {budget:g} s"
        )


def _untold(told: Sequence[str], notes: Sequence[str]) -> list[str]:
    """Return the notes of the passes that say something new; of captured loops, it is told already why they stay."""
    loops = any(note.startswith(STAYS) for note in told)
    return [note for note in dict.fromkeys(notes) if note not in told and not (loops and note.startswith(STAYS))]


def describe_captured(gm: GraphModule, report: GraphReport) -> tuple[GraphModule, GraphReport]:
    """Return a graph as it would be rewritten before autograd, and the report with that."""
    notes, unjudged = list(report.notes), Options(verify="off", accept="always")
    record = Record(unjudged, None)
    gm = duplicate(define_scans(scans_as_loops(gm, notes), everywhere=True))
    early = EarlyRewrites(gm, (), unjudged, report.mode, record, no_verdict, notes, torch.is_grad_enabled())
    early.rewrite()
    rows = tuple(replace(row, key="", status="found") for row in record.applied)
    return early.gm, replace(
        report, notes=tuple(notes), loops=(*report.loops, *early.loops), rewrites=(*report.rewrites, *rows)
    )


def survey(graph: Graph, report: GraphReport) -> GraphReport:
    """Return the report with what the pipeline would do with a graph; edits the graph."""
    earlier, before, notes = report.rewrites, graph_cost(graph.nodes), list[str]()
    rows = tuple(map(row_of, run_pipeline(graph, notes=notes)))
    after = graph_cost(graph.nodes)
    return replace(
        report.saying(*_untold(report.notes, notes)),
        rewrites=earlier + rows,
        # What was rewritten before autograd is in the graph already.
        flops_before=before.flops + sum(row.flops_before - row.flops_after for row in earlier),
        bytes_before=before.bytes + sum(row.bytes_before - row.bytes_after for row in earlier),
        flops_after=after.flops,
        bytes_after=after.bytes,
    )
