"""The compile of a graph that was decided before: the same rewrites and no others, without races.

What is remembered of this process or the disk was checked, and is trusted. What a plan pins is checked here, unless
that was done before. Design decision 20.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from torch.fx import GraphModule

from ..errors import PlanError, warn
from ..report import GraphReport
from ..verify.contention import crowding
from .decisions import Key, Plan, Store, Unnameable, digest, folder_for, name_program, place
from .inductor import Compiled
from .options import Options
from .record import Decided, Misfit
from .refusals import refused
from .session import GraphCompile, TooLong
from .validate.program import Outcome, plain

log = logging.getLogger("refold")

# A graph that takes less is not raced again for every length.
TINY_MS = 1.0

# What the report of a replay does not take over: its own place, words and seconds.
_OWN = ("index", "program", "notes", "compile_s", "checks_s", "inductor_compile_s", "remembered")


def execute(
    decision: GraphReport, gm: GraphModule, inputs: Sequence[Any], options: Options, report: GraphReport, store: Store,
    *, trusted: bool,
) -> Outcome:  # fmt: skip
    """Compile a graph as it was decided, without races.

    Args:
        decision: What was decided.
        gm: The graph.
        inputs: The values it was captured with.
        options: The options of the compile.
        report: What is known of the graph now: its place and name, and who knew the decision.
        store: Where decisions are kept.
        trusted: Whether the rewrites of the decision were checked.

    Raises:
        Misfit: The decision does not fit the graph.
    """
    start = time.perf_counter()
    applied = {row.key: row for row in decision.applied}
    refusals = frozenset(row.key for row in decision.rewrites if row.status == "refused")
    session = GraphCompile(
        gm,
        inputs,
        replace(options, accept="always"),
        report,
        store,
        decided=Decided(applied, refusals, decision.external_scans, trusted),
    )
    session.mode = decision.mode
    own = {name: getattr(report, name) for name in _OWN}
    known = replace(decision, **own).saying(*session.notes, *decision.notes)
    if decision.chosen == "eager":
        return Outcome(session.given, known)
    if decision.chosen == "inductor" and decision.rewrites:
        return plain(session.given, inputs, replace(options, inductor=session.inductor), known)
    session.rewrite_before_autograd()
    eager: Callable[[], Compiled] | None = None
    try:
        compiled = session.built()
    except TooLong:
        compiled = session.gm
        eager = lambda: session.gm  # noqa: E731
    if compiled is None:
        raise Misfit("Inductor cannot compile it any more")
    if session.seen and (missing := applied.keys() - session.rows.keys()):
        raise Misfit(f"there is no {min(missing)} to be rewritten")
    compile_s = time.perf_counter() - start - session.checks_s
    known = replace(known.saying(*session.notes), checks_s=session.checks_s, compile_s=compile_s)
    if session.record.unjudged or not applied:
        return Outcome(compiled, known)
    outcome = session.last_word(compiled, known, eager)
    if outcome.report.chosen != "refold":
        raise Misfit(outcome.report.reason)
    return Outcome(compiled, outcome.report)


class Remembering:
    """Compiles a graph as a plan says, as it was decided before, or afresh."""

    def __init__(self, gm: GraphModule, inputs: Sequence[Any], options: Options, report: GraphReport) -> None:
        self.gm, self.inputs, self.options = gm, inputs, options
        self.key: Key | None = None
        # Whether what a busy machine left open is decided for the second time.
        self._again = False
        try:
            self.key = name_program(gm, inputs, options.facts())
        except Unnameable as reason:
            log.info("decisions about graph %d are not stored: %s", report.index, reason)
        self.report = replace(report, program=self.key.exact if self.key is not None else "")
        self.store = Store(folder_for(options.cache) if self.key is not None else None, place(inputs))

    def run(self) -> Outcome:
        """Return the program that runs from now on, and what was decided."""
        if self.options.plan is not None:
            outcome = self._planned(self.options.plan)
        else:
            outcome = self._replayed() or self._afresh()
        return Outcome(outcome.program, outcome.report.saying(*self.store.notes))

    def _execute(self, decision: GraphReport, where: str, *, trusted: bool) -> Outcome:
        report = replace(self.report, remembered=where)
        return execute(decision, self.gm, self.inputs, self.options, report, self.store, trusted=trusted)

    def _replayed(self) -> Outcome | None:
        """Do what was decided before; None if nothing was, or if it does not fit."""
        found = self.store.get("graph", self.report.program)
        if found is None:
            return None
        try:
            decision = GraphReport.from_dict(found[0])
            if decision.provisional and found[1] == "the disk" and crowding() <= 1:
                self._again = True
                return None
            return self._execute(decision, found[1], trusted=True)
        except (Misfit, KeyError, TypeError) as error:
            self.report = self.report.saying(
                f"the decision about this graph that {found[1]} remembered does not fit: {error}"
            )
            self.store.drop("graph", self.report.program)
            return None

    def _planned(self, plan: Plan) -> Outcome:
        """Do what a plan says; where it does not fit, Inductor compiles the graph, as it would at each run."""
        report = self.report
        try:
            if self.key is None:
                raise Misfit("the graph has no name that means the same in another process")
            if (decision := plan.graphs.get(report.program)) is None:
                raise Misfit("it does not hold this graph at these sizes, dtypes and options")
            applied = sorted(f"{row.key} {row.signature}" for row in decision.applied)
            key = digest([report.program, decision.chosen, str(decision.external_scans), *applied])
            checked = self.store.get("plan", key) is not None
            outcome = self._execute(decision, "a plan", trusted=checked)
            if not checked and self.options.verify != "off":
                self.store.put("plan", key, True)
            return outcome
        except Misfit as misfit:
            text = f"the plan does not fit graph {report.index}: {misfit}"
            if self.options.strict:
                raise PlanError(f"{text}. Make a new one with report.save(path)") from None
            warn(f"{text}; Inductor compiles it")
            report = replace(report, chosen="inductor", reason="because the plan does not fit")
            return plain(self.gm, self.inputs, self.options, report.saying(refused("plan-misfit", text)))

    def _afresh(self) -> Outcome:
        """Decide, and remember it."""
        options, report, lost = self.options, self.report, frozenset[tuple[str, str]]()
        if options.accept == "faster" and self.key is not None:
            # A graph that takes microseconds is spared the races that it had at other sizes of the same kind.
            found = self.store.get("alike", self.key.alike)
            if found is not None:
                before = GraphReport.from_dict(found[0])
                report = replace(report, remembered=found[1])
                if before.chosen != "refold":
                    reason = "because it was the fastest at sizes between the same powers of two"
                    report = replace(report, chosen=before.chosen, mode=before.mode, reason=reason)
                    eager = before.chosen == "eager"
                    return Outcome(self.gm, report) if eager else plain(self.gm, self.inputs, options, report)
                options = replace(options, accept="always")
                lost = frozenset((row.name, row.source) for row in before.rewrites if row.status == "refused")
        session = GraphCompile(self.gm, self.inputs, options, report, self.store, lost=lost)
        program, found_out = session.run()
        if session.lost_together(found_out):
            log.info("the rewrites together are not faster: each is timed alone")
            again = replace(report, notes=found_out.notes, mode=found_out.mode)
            session = GraphCompile(self.gm, self.inputs, options, again, self.store, earlier=session, lost=lost)
            program, alone = session.run()
            found_out = replace(
                alone,
                compile_s=found_out.compile_s + alone.compile_s,
                checks_s=found_out.checks_s + alone.checks_s,
                inductor_compile_s=found_out.inductor_compile_s or alone.inductor_compile_s,
            )
        if found_out.remembered and found_out.chosen == "refold":
            found_out = replace(found_out, reason="as it does at sizes between the same powers of two")
        return Outcome(program, found_out if session.failed else self._remembered(found_out))

    def _remembered(self, report: GraphReport) -> GraphReport:
        """Keep what was decided; what a busy machine left open is decided once more, by a later process."""
        report = replace(report, provisional=report.provisional and not self._again)
        if report.busy:
            then = "; a later process decides again when it is quiet" if report.provisional else ""
            report = report.saying(f"the machine was busy during the measurements ({report.busy}){then}")
        if self.key is None:
            return report
        data = asdict(report)
        self.store.put("graph", self.key.exact, data)
        alone = [row.original_ms for row in report.rewrites if row.original_ms is not None]
        times = [*report.times_ms.values(), *alone]
        if times and max(times) < TINY_MS and not report.busy:
            self.store.put("alike", self.key.alike, data, lasting=False)
        return report
