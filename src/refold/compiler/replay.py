"""The compile of a graph that was decided before: the same rewrites and no others, without races.

What is remembered of this process or the disk was checked, and is trusted. What a plan pins is checked here, unless
that was done before.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from ..errors import PlanError, warn
from ..report import GraphReport, RewriteReport
from ..verify.contention import crowding
from .decisions import Key, Plan, Store, Unnameable, digest, folder_for, name_program, place
from .inductor import Compiled
from .ir.rewrite import Rewrite
from .options import Options
from .refusals import refused
from .session import GraphCompile, TooLong
from .validate.program import plain
from .validate.region import Verdict

log = logging.getLogger("refold")

# A graph that takes less is not raced again for every length.
TINY_MS = 1.0

# What the report of a replay does not take over: its own place, words and seconds.
_OWN = ("index", "program", "notes", "compile_s", "checks_s", "inductor_compile_s")


class Misfit(Exception):
    """A decision does not fit the program that it is to be replayed on; the message says where."""


class Replay(GraphCompile):
    """The compile of one graph as it was decided.

    Args:
        decision: What was decided.
        where: Who knew it.
        trusted: Whether its rewrites were checked.
    """

    def __init__(
        self,
        gm: GraphModule,
        inputs: Sequence[Any],
        options: Options,
        entry: GraphReport,
        store: Store,
        decision: GraphReport,
        where: str,
        *,
        trusted: bool,
    ) -> None:
        super().__init__(gm, inputs, dataclasses.replace(options, accept="always"), entry, store)
        self.decision, self.where = copy.deepcopy(decision), where
        self.decided = {row.key: row for row in self.decision.rewrites if row.status == "applied"}
        self.refused = {row.key for row in decision.rewrites if row.status == "refused"}
        self._known = trusted
        self.external_scans = decision.external_scans

    def run(self) -> Compiled:
        """Return the program that was decided on.

        Raises:
            Misfit: The decision does not fit.
        """
        start = time.perf_counter()
        entry, decision = self.entry, self.decision
        for field in dataclasses.fields(decision):
            if field.name not in _OWN:
                setattr(entry, field.name, getattr(decision, field.name))
        entry.remembered = self.where
        entry.notes += [note for note in decision.notes if note not in entry.notes]
        if decision.chosen == "eager":
            return self.given
        if decision.chosen == "inductor" and decision.rewrites:
            return plain(self.given, self.inputs, dataclasses.replace(self.options, inductor=self.inductor), entry)
        self._rewrite_before_autograd()
        eager: Callable[[], Compiled] | None = None
        try:
            compiled = self._built()
        except TooLong:
            compiled = self.gm
            eager = lambda: self.gm  # noqa: E731
        if compiled is None:
            raise Misfit("Inductor cannot compile it any more")
        if self.seen and (missing := self.decided.keys() - self.rows.keys()):
            raise Misfit(f"there is no {min(missing)} to be rewritten")
        entry.flops_before, entry.bytes_before = decision.flops_before, decision.bytes_before
        entry.compile_s = time.perf_counter() - start - entry.checks_s
        if not self._unjudged and self.decided:
            self._last_word(compiled, eager)
            if entry.chosen != "refold":
                raise Misfit(entry.reason)
        return compiled

    def _wanted(self, key: str) -> bool:
        return key in self.decided

    def _note(self, key: str, rewrite: Rewrite, verdict: Verdict | None) -> RewriteReport:
        row = self.decided[key]
        if row.signature != rewrite.signature:
            raise Misfit(f"{rewrite.name} [{rewrite.site}] is another one")
        if verdict is not None and verdict.reason:
            raise Misfit(f"{rewrite.name} [{rewrite.site}] is {verdict.reason}")
        self.rows[key] = row
        return row

    @property
    def _stands(self) -> bool:
        return bool(self.decided)

    @property
    def _unjudged(self) -> bool:
        return self._known or self.options.verify == "off"


class Remembering:
    """Compiles a graph as a plan says, as it was decided before, or afresh."""

    def __init__(self, gm: GraphModule, inputs: Sequence[Any], options: Options, entry: GraphReport) -> None:
        self.gm, self.inputs, self.options, self.entry = gm, inputs, options, entry
        self.key: Key | None = None
        # Whether what a busy machine left open is decided for the second time.
        self._again = False
        try:
            self.key = name_program(gm, inputs, options.facts())
        except Unnameable as reason:
            log.info("decisions about graph %d are not stored: %s", entry.index, reason)
        entry.program = self.key.exact if self.key is not None else ""
        self.store = Store(folder_for(options.cache) if self.key is not None else None, place(inputs))

    def run(self) -> Compiled:
        """Return the program that runs from now on, and fill the report."""
        try:
            if self.options.plan is not None:
                return self._planned(self.options.plan)
            return self._replayed() or self._afresh()
        finally:
            self.entry.notes += [note for note in self.store.notes if note not in self.entry.notes]

    def _replay(self, decision: GraphReport, where: str, *, trusted: bool) -> Compiled:
        return Replay(
            self.gm, self.inputs, self.options, self.entry, self.store, decision, where, trusted=trusted
        ).run()

    def _replayed(self) -> Compiled | None:
        """Do what was decided before; None if nothing was, or if it does not fit."""
        found = self.store.get("graph", self.entry.program)
        if found is None:
            return None
        index, notes, mode = self.entry.index, list(self.entry.notes), self.entry.mode
        try:
            decision = GraphReport.from_dict(found[0])
            if decision.provisional and found[1] == "the disk" and crowding() <= 1:
                self._again = True
                return None
            return self._replay(decision, found[1], trusted=True)
        except (Misfit, KeyError, TypeError) as error:
            _reset(self.entry, index, mode, self.entry.program)
            self.entry.notes += [
                *notes,
                f"the decision about this graph that {found[1]} remembered does not fit: {error}",
            ]
            self.store.drop("graph", self.entry.program)
            return None

    def _planned(self, plan: Plan) -> Compiled:
        """Do what a plan says; where it does not fit, Inductor compiles the graph, as it would at each run."""
        entry = self.entry
        try:
            if self.key is None:
                raise Misfit("the graph has no name that means the same in another process")
            if (decision := plan.graphs.get(entry.program)) is None:
                raise Misfit("it does not hold this graph at these sizes, dtypes and options")
            applied = sorted(f"{row.key} {row.signature}" for row in decision.applied)
            key = digest([entry.program, decision.chosen, str(decision.external_scans), *applied])
            checked = self.store.get("plan", key) is not None
            compiled = self._replay(decision, "a plan", trusted=checked)
            if not checked and self.options.verify != "off":
                self.store.put("plan", key, True)
            return compiled
        except Misfit as misfit:
            text = f"the plan does not fit graph {entry.index}: {misfit}"
            if self.options.strict:
                raise PlanError(f"{text}. Make a new one with report.save(path)") from None
            warn(f"{text}; Inductor compiles it")
            entry.notes.append(refused("plan-misfit", text))
            entry.chosen, entry.reason = "inductor", "because the plan does not fit"
            for row in entry.rewrites:
                row.status, row.reason = "refused", refused("plan-misfit", text)
            return plain(self.gm, self.inputs, self.options, entry)

    def _afresh(self) -> Compiled:
        """Decide, and remember it."""
        options, lost, entry = self.options, set[tuple[str, str]](), self.entry
        if options.accept == "faster" and self.key is not None:
            # A graph that takes microseconds is spared the races that it had at other sizes of the same kind.
            found = self.store.get("alike", self.key.alike)
            if found is not None:
                before = GraphReport.from_dict(found[0])
                entry.remembered = found[1]
                if before.chosen != "refold":
                    entry.chosen, entry.mode = before.chosen, before.mode
                    entry.reason = "because it was the fastest at sizes between the same powers of two"
                    return self.gm if before.chosen == "eager" else plain(self.gm, self.inputs, options, entry)
                options = dataclasses.replace(options, accept="always")
                lost = {(row.name, row.source) for row in before.rewrites if row.status == "refused"}
        session = GraphCompile(self.gm, self.inputs, options, entry, self.store)
        session.lost = lost
        compiled = session.run()
        if session.lost_together:
            log.info("the rewrites together are not faster: each is timed alone")
            before = copy.copy(entry)
            _reset(entry, before.index, before.mode, before.program)
            entry.remembered, entry.notes = before.remembered, before.notes
            session = GraphCompile(self.gm, self.inputs, options, entry, self.store, earlier=session)
            session.lost = lost
            compiled = session.run()
            entry.compile_s, entry.checks_s = entry.compile_s + before.compile_s, entry.checks_s + before.checks_s
            entry.inductor_compile_s = before.inductor_compile_s or entry.inductor_compile_s
        if entry.remembered and entry.chosen == "refold":
            entry.reason = "as it does at sizes between the same powers of two"
        if not session.failed:
            self._remember()
        return compiled

    def _remember(self) -> None:
        """Keep what was decided; what a busy machine left open is decided once more, by a later process."""
        entry = self.entry
        entry.provisional &= not self._again
        if entry.busy:
            then = "; a later process decides again when it is quiet" if entry.provisional else ""
            entry.notes.append(f"the machine was busy during the measurements ({entry.busy}){then}")
        if self.key is None:
            return
        data = dataclasses.asdict(entry)
        self.store.put("graph", self.key.exact, data)
        times = [*entry.times_ms.values(), *(row.original_ms for row in entry.rewrites if row.original_ms is not None)]
        if times and max(times) < TINY_MS and not entry.busy:
            self.store.put("alike", self.key.alike, data, lasting=False)


def _reset(entry: GraphReport, index: int, mode: str, program: str) -> None:
    """Empty an entry of the report."""
    for name, value in vars(GraphReport(index, mode, program=program)).items():
        setattr(entry, name, value)
