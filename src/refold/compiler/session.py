"""The compile of one graph: find rewrites, prove them, apply those that stand, keep the fastest program."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, GraphModule, Node

from ..errors import PlanError, warn
from ..report import GraphReport, RewriteReport
from .compile_time import inductor_seconds, unrolled_seconds
from .decisions import Key, Plan, Store, Unnameable, digest, folder_for, name_program, place, versions
from .dynamo.loop import lifted_loops
from .external_cumsum import keep_scans_external
from .inductor import Compiled, Hook, Stopped, bind, clone_inputs, duplicate, inductor
from .ir.cost import Cost, graph_cost
from .ir.evaluate import values_at
from .ir.rewrite import Rewrite
from .pipeline import run as run_pipeline
from .recurrence.serial_chains import unrolled_operations
from .recurrence.vectorize import NotALoop
from .validate.program import Rewritten, first_line, last_word
from .validate.region import Settings, Verdict, judge, undisturbed_rng

log = logging.getLogger("refold")

# A graph that takes less is not raced again for every length.
TINY_MS = 1.0


@dataclass
class _Pending:
    """A graph whose rewrites are still to be judged."""

    index: int
    original: Graph
    rewritten: Graph
    rewrites: list[Rewrite]


class Misfit(Exception):
    """A decision does not fit the program it is to be replayed on; the message says where."""


class TooLong(Exception):
    """Inductor would take longer for an unrolled loop than it may; the message says how long."""


class GraphCompile:
    """The compile of one graph."""

    def __init__(self, gm: GraphModule, inputs: Sequence[Any], settings: Settings, entry: GraphReport) -> None:
        self.given, self.inputs, self.settings, self.entry = gm, inputs, settings, entry
        self.key: Key | None = None
        try:
            facts = {name: getattr(settings, name) for name in ("verify", "accept", "loops")}
            self.key = name_program(gm, inputs, {**facts, "options": dict(settings.options or {})})
        except Unnameable as reason:
            log.info("graph %d is not remembered: %s", entry.index, reason)
        entry.program = self.key.exact if self.key is not None else ""
        self.store = Store(folder_for(settings.cache) if self.key is not None else None, place(inputs))
        self._reset()

    def _reset(self) -> None:
        self.gm = self.given
        self.options = dict(self.settings.options or {})
        self.refused: set[str] = set()
        self.verdicts: dict[str, Verdict] = {}
        self.rows: dict[str, RewriteReport] = {}
        # How many sizes of cumulative sums are handed to ATen, and how many there are.
        self.external_scans, self.scan_sizes = 0, 0
        # The number of terms in the longest sum that was rewritten.
        self.terms = 1
        # What is replayed, by key; and whether it was checked before.
        self.decided: dict[str, RewriteReport] | None = None
        self.trusted = False
        # Rewrites (pass, line) that lost the race at other sizes of the same kind; None if nothing is known of such.
        self.lost: set[tuple[str, str]] | None = None
        # Whether the last compile showed its graph, and whether one failed.
        self.seen, self.failed = True, False

    def run(self) -> Compiled:
        """Return the program that runs from now on, and fill the report."""
        try:
            return self._replayed() or self._decided()
        finally:
            self.entry.notes += [note for note in self.store.notes if note not in self.entry.notes]

    def _decided(self) -> Compiled:
        """Find rewrites, judge them, and take the fastest program."""
        start = time.perf_counter()
        entry = self.entry
        if (chosen := self._decided_alike()) is not None:
            return chosen
        saved = self._roll_up_lifted()
        try:
            self._check_time(unrolled_seconds(self.gm, entry.mode))
            compiled = self._compile()
        except TooLong as reason:
            return self._left_eager(reason)
        entry.flops_before += saved.flops
        entry.bytes_before += saved.bytes
        entry.compile_s = time.perf_counter() - start - entry.proof_s
        entry.rewrites = list(self.rows.values())
        entry.external_scans = self.external_scans
        if compiled is None:
            entry.chosen = "eager"
            return self.given
        if not entry.applied and not self.external_scans:
            entry.chosen = "inductor"
            entry.reason = "no rewrite stands" if self.rows else ""
        else:
            entry.chosen = "refold"
            if self.lost is not None:
                entry.reason = "as it does at sizes between the same powers of two"
            if entry.applied and (self.settings.verify != "off" or self.settings.accept == "faster"):
                start = time.perf_counter()
                rewritten = Rewritten(compiled, self._repeatable, self.terms)
                compiled = last_word(rewritten, self.given, self.inputs, self.settings, entry)
                entry.proof_s += time.perf_counter() - start
        log.info("graph %d: %s runs, %d rewrites", entry.index, entry.chosen, len(entry.applied))
        self._remember()
        return compiled

    def _left_eager(self, reason: TooLong) -> Compiled:
        """Let the graph run eagerly, with scans for those of its loops that are some."""
        entry = self.entry
        for key, row in self.rows.items():
            if not key.startswith("lifted:") and row.status != "refused":
                row.status, row.reason = "refused", "the graph runs eagerly"
        entry.rewrites = list(self.rows.values())
        entry.chosen, entry.reason = "eager", f"because {reason}"
        entry.notes.append(f"the graph runs eagerly: {reason}")
        log.warning("graph %d runs eagerly: %s", entry.index, reason)
        compiled: Compiled = self.given
        if entry.applied:
            entry.chosen = "refold"
            for name in ("flops_before", "flops_after", "bytes_before", "bytes_after"):
                setattr(entry, name, sum(getattr(row, name) for row in entry.applied))
            compiled = last_word(
                Rewritten(self.gm, lambda: self.gm, self.terms), self.given, self.inputs, self.settings, entry
            )
        else:
            self._remember()
        return compiled

    # Remembering -------------------------------------------------------------------------------

    def _remember(self) -> None:
        """Keep what was decided, unless something failed; on disk, unless the machine was busy."""
        if self.key is None or self.failed:
            return
        entry = self.entry
        busy = [race.busy for verdict in self.verdicts.values() if (race := verdict.race) is not None and race.busy]
        entry.busy = entry.busy or next(iter(busy), "")
        if entry.busy:
            entry.notes.append(f"the machine was busy while times were taken ({entry.busy}); they are not remembered")
        data = dataclasses.asdict(entry)
        if self.settings.plan is not None:
            self.store.put("plan", self._plan_key(entry), data)
            return
        self.store.put("graph", self.key.exact, data, lasting=not entry.busy)
        times = [*entry.times_ms.values(), *(row.original_ms for row in entry.rewrites if row.original_ms is not None)]
        if times and max(times) < TINY_MS and not entry.busy:
            self.store.put("alike", self.key.alike, data, lasting=False)

    def _plan_key(self, entry: GraphReport) -> str:
        applied = sorted(f"{row.key} {row.signature}" for row in entry.applied)
        return digest([entry.program, entry.chosen, str(entry.external_scans), *applied])

    def _replayed(self) -> Compiled | None:
        """Do what was decided before; None if nothing was, or if it does not fit."""
        entry = self.entry
        if self.settings.plan is not None:
            return self._planned(Plan.read(self.settings.plan))
        found = None if self.key is None else self.store.get("graph", self.key.exact)
        if found is None:
            return None
        try:
            return self._replay(GraphReport.from_dict(found[0]), found[1])
        except (Misfit, KeyError, TypeError) as error:
            entry.notes.append(f"what {found[1]} knew of this graph does not fit: {error}")
            entry.remembered = ""
            self.store.drop("graph", entry.program)
            self._reset()
            return None

    def _planned(self, plan: Plan) -> Compiled:
        """Do what a plan says; where it does not fit, Inductor compiles the graph, as it would at each run."""
        entry = self.entry
        try:
            if self.key is None:
                raise Misfit("the graph has no name that means the same in another process")
            if (decision := plan.graphs.get(entry.program)) is None:
                raise Misfit("it does not hold this graph at these sizes, dtypes and options")
            checked = self.store.get("plan", self._plan_key(decision)) is not None or self.settings.verify == "off"
            return self._replay(decision, "a plan", trusted=checked)
        except Misfit as misfit:
            text = f"the plan does not fit graph {entry.index}: {misfit}"
            if self.settings.strict:
                raise PlanError(f"{text}. Make a new one with report.save(path)") from None
            warn(f"{text}; Inductor compiles it")
            entry.notes.append(text)
            entry.chosen, entry.reason = "inductor", "because the plan does not fit"
            for row in entry.rewrites:
                row.status, row.reason = "refused", "the plan does not fit"
            return inductor(self.given, self.inputs, options=dict(self.settings.options or {}))

    def _replay(self, decision: GraphReport, where: str, *, trusted: bool = True) -> Compiled:
        """Apply the rewrites of a decision and no others; check them unless they were checked before."""
        start = time.perf_counter()
        entry, notes = self.entry, self.entry.notes
        for name, value in dataclasses.asdict(decision).items():
            if name not in ("index", "program", "notes", "compile_s", "proof_s"):
                setattr(entry, name, value)
        entry.rewrites = decision.rewrites
        entry.remembered = where
        notes += [note for note in decision.notes if note not in notes]
        if decision.chosen == "eager":
            return self.given
        if decision.chosen == "inductor" and decision.rewrites:
            return inductor(self.given, self.inputs, options=self.options)
        self.decided = {row.key: row for row in decision.rewrites}
        self.refused = {row.key for row in decision.rewrites if row.status == "refused"}
        self.trusted = trusted
        self.external_scans = decision.external_scans
        before = entry.flops_before, entry.bytes_before
        self.settings = dataclasses.replace(self.settings, accept="always")
        self._roll_up_lifted()
        compiled = self._compile()
        if compiled is None:
            raise Misfit("Inductor cannot compile it any more")
        if self.seen and (missing := {row.key for row in decision.applied} - self.rows.keys()):
            raise Misfit(f"there is no {min(missing)} to be rewritten")
        entry.flops_before, entry.bytes_before = before
        entry.compile_s = time.perf_counter() - start - entry.proof_s
        if not trusted and decision.applied:
            start = time.perf_counter()
            rewritten = Rewritten(compiled, self._repeatable, self.terms)
            last_word(rewritten, self.given, self.inputs, self.settings, entry)
            entry.proof_s += time.perf_counter() - start
            if entry.chosen != "refold":
                raise Misfit(entry.reason)
            self._remember()
        return compiled

    def _as_decided(self, key: str, rewrite: Rewrite) -> RewriteReport:
        """Return what was decided about a rewrite; it must be the same rewrite."""
        assert self.decided is not None
        row = self.decided.get(key)
        if row is None or row.status != "applied" or row.signature != rewrite.signature:
            raise Misfit(f"{rewrite.name} [{rewrite.site}] is another one")
        self.rows[key] = row
        self.terms = max(self.terms, rewrite.terms)
        return row

    def _decided_alike(self) -> Compiled | None:
        """Spare a graph that takes microseconds the races that it had at other sizes of the same kind."""
        found = (
            None if self.key is None or self.settings.accept == "always" else self.store.get("alike", self.key.alike)
        )
        if found is None:
            return None
        before = GraphReport.from_dict(found[0])
        self.entry.remembered = found[1]
        if before.chosen == "refold":
            self.settings = dataclasses.replace(self.settings, accept="always")
            self.lost = {(row.name, row.source) for row in before.rewrites if row.status == "refused"}
            return None
        self.entry.chosen, self.entry.mode = before.chosen, before.mode
        self.entry.reason = "because it was the fastest at sizes between the same powers of two"
        if before.chosen == "eager":
            return self.given
        return inductor(self.given, self.inputs, options=self.options)

    def _judged(self, rewrite: Rewrite, actual: Sequence[Any] | None) -> Verdict:
        """Judge a rewrite, unless it was judged before in this place."""
        if self.lost is not None and (rewrite.name, rewrite.source) in self.lost:
            return Verdict("not faster at sizes between the same powers of two")
        facts = [rewrite.signature, str(rewrite.differentiated), str(rewrite.spread), str(rewrite.terms)]
        options = json.dumps(dict(self.settings.options or {}), sort_keys=True, default=repr)
        key = digest([*facts, self.settings.verify, self.settings.accept, options])
        if (found := self.store.get("region", key)) is not None:
            try:
                return Verdict.from_dict(found[0])
            except (KeyError, TypeError) as error:
                self.entry.notes.append(f"what {found[1]} knew of a region does not fit: {error}")
        verdict = judge(rewrite, actual, self.settings)
        busy = verdict.race is not None and bool(verdict.race.busy)
        self.store.put("region", key, dataclasses.asdict(verdict), lasting=not busy)
        return verdict

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
                found = self._lowered(call)
            except NotALoop as reason:
                self.entry.notes.append(f"a loop over time stays: {reason} [{serial(self.gm, call)}]")
                continue
            if found is not None:
                found.splice()
                before, after = found.rewrite.before, found.rewrite.after
                saved += Cost(before.flops - after.flops, before.bytes - after.bytes)
        self.gm.recompile()
        return saved

    def _lowered(self, call: Node) -> Any:
        """Return a lifted loop as the scan that stands; None if none does."""
        from .dynamo.to_scan import lowering

        for dual in (True, False):
            key = f"lifted:{call.name}:{dual}"
            if self.decided is not None and (key not in self.decided or self.decided[key].status != "applied"):
                continue
            found = lowering(self.gm, call, dual)
            rewrite = found.rewrite
            if self.decided is not None:
                self._as_decided(key, rewrite)
                if not self.trusted and (reason := self._verdict(rewrite).reason):
                    raise Misfit(f"{rewrite.name} [{rewrite.site}] is {reason}")
                return found
            verdict = None
            if self.settings.verify != "off" or self.settings.accept != "always":
                start = time.perf_counter()
                verdict = self._verdict(rewrite)
                self.entry.proof_s += time.perf_counter() - start
            row = self.rows[key] = _row(rewrite, key, verdict)
            if verdict is None or not verdict.reason:
                row.status = "applied"
                self.terms = max(self.terms, rewrite.terms)
                if found.fixed:
                    self.entry.notes.append(f"this compile is for these sizes alone: {found.fixed} [{call.name}]")
                return found
            row.status = "refused"
            if not found.dual:
                break  # else what does not write the states rounds too much, or is slower
        return None

    def _verdict(self, rewrite: Rewrite) -> Verdict:
        """Judge the rewrite of a lifted loop on the values that it gets from the user's inputs."""
        if rewrite.signature not in self.verdicts:
            with undisturbed_rng():
                found = values_at(self.gm.graph, rewrite.inputs, clone_inputs(self.inputs))
                actual = [found[name] for name in rewrite.inputs]
                self.verdicts[rewrite.signature] = self._judged(rewrite, actual)
        return self.verdicts[rewrite.signature]

    # Finding and proving rewrites ------------------------------------------------------------

    def _compile(self) -> Compiled | None:
        """Start Inductor until every rewrite it sees has been judged; None if it cannot compile the graph."""
        # AOTAutograd's cache may be asked when all that the pass will do is known.
        settled = self.trusted
        while True:
            pending: list[_Pending] = []
            outcome = digest([*versions(), *sorted(self.refused), str(self.external_scans)])
            hook = Hook(functools.partial(self._visit, pending), outcome, settled)
            log.info("compiling graph %d", self.entry.index)
            try:
                compiled = inductor(self.gm, self.inputs, hook=hook, options=self.options)
                self.seen = hook.count > 0
                if self.seen or self.trusted:
                    return compiled
                settled = False  # the cache answered, and nobody knows what was rewritten
                continue
            except Exception as error:
                if hook.error is not None:
                    raise hook.error from None
                if not hook.stopped:
                    if not self._recover(error):
                        self.failed = True
                        return None
                    continue
            start = time.perf_counter()
            for found in pending:
                self._judge(found)
            self.entry.proof_s += time.perf_counter() - start
            settled = True

    def _visit(self, pending: list[_Pending], index: int, graph: Graph) -> None:
        """Rewrite one ATen graph in place, or stop the compile to judge what is new."""
        if any(str(node.target).startswith("tangents") for node in graph.find_nodes(op="placeholder")):
            self.entry.mode = "training"
        if index == 0:
            self.entry.flops_before = self.entry.flops_after = self.entry.bytes_before = self.entry.bytes_after = 0
        before = graph_cost(graph.nodes)
        original = _copy(graph)
        notes: list[str] = []
        rewrites = run_pipeline(graph, lambda site: self._wanted(f"{index}:{site}"), notes)
        self.entry.notes += [note for note in notes if note not in self.entry.notes]
        for rewrite in rewrites:
            key = f"{index}:{rewrite.site}"
            if self.decided is None:
                self.rows[key] = _row(rewrite, key, self.verdicts.get(rewrite.signature))
            else:
                self._as_decided(key, rewrite)
        proofless = self.trusted or (self.settings.verify == "off" and self.settings.accept == "always")
        if not proofless and any(rewrite.signature not in self.verdicts for rewrite in rewrites):
            pending.append(_Pending(index, original, graph, rewrites))
            raise Stopped
        for rewrite in rewrites:
            self.rows[f"{index}:{rewrite.site}"].status = "applied"
            self.terms = max(self.terms, rewrite.terms)
        if inductor_seconds(len(graph.nodes)) > self.settings.compile_budget:
            self._check_time(inductor_seconds(unrolled_operations(graph)))
        after = graph_cost(graph.nodes) if rewrites else before
        self.entry.flops_before += before.flops
        self.entry.flops_after += after.flops
        self.entry.bytes_before += before.bytes
        self.entry.bytes_after += after.bytes
        self.scan_sizes = max(self.scan_sizes, keep_scans_external(graph, self.external_scans))

    def _check_time(self, seconds: float) -> None:
        """Raise if Inductor would take longer for unrolled loops than it may."""
        if seconds > (budget := self.settings.compile_budget):
            raise TooLong(
                f"Inductor would take about {seconds:.0f} s to compile an unrolled loop; compile_budget is {budget:g} s"
            )

    def _wanted(self, key: str) -> bool:
        """Tell whether a rewrite may be made."""
        if self.decided is None:
            return key not in self.refused
        return key in self.decided and self.decided[key].status == "applied"

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
                self.verdicts[rewrite.signature] = self._judged(rewrite, actual)
        for rewrite in rewrites:
            verdict = self.verdicts[rewrite.signature]
            key = f"{index}:{rewrite.site}"
            if self.decided is not None:
                if verdict.reason:
                    raise Misfit(f"{rewrite.name} [{rewrite.site}] is {verdict.reason}")
                continue
            self.rows[key] = _row(rewrite, key, verdict)
            if verdict.reason:
                self.rows[key].status = "refused"
                self.refused.add(key)

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
        warn(f"Inductor failed on this graph ({text}); it runs eagerly")
        self.entry.notes.append(f"Inductor failed ({text}); the graph runs eagerly")
        return False


def _copy(graph: Graph) -> Graph:
    twin = copy.deepcopy(graph)
    twin.owning_module = graph.owning_module
    return twin


def _row(rewrite: Rewrite, key: str, verdict: Verdict | None) -> RewriteReport:
    row = RewriteReport(
        key=key,
        signature=rewrite.signature,
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
        from .dynamo.to_scan import lowering, serial

        loop = serial(gm, call)
        try:
            found = lowering(gm, call)
        except NotALoop:
            continue  # it is found again, and described, when it is unrolled
        entry.loops.append(loop)
        entry.rewrites.append(_row(found.rewrite, "", None))
        found.splice()
    gm.recompile()
    return gm


def survey(entry: GraphReport, graph: Graph) -> None:
    """Write into a report what the pipeline would do with a graph; edits the graph."""
    before = graph_cost(graph.nodes)
    entry.rewrites += [_row(rewrite, "", None) for rewrite in run_pipeline(graph)]
    after = graph_cost(graph.nodes)
    entry.flops_before, entry.flops_after = before.flops, after.flops
    entry.bytes_before, entry.bytes_after = before.bytes, after.bytes
