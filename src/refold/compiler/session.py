"""The compile of one graph: find rewrites, check them, apply those that stand, keep the fastest program.

Design decision 5.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..errors import warn
from ..report import GraphReport, RewriteReport
from .compile_time import WITH_BACKWARD, inductor_seconds, layer_seconds, unrolled_seconds
from .decisions import Store, digest, versions
from .dynamo import rewriting_before_autograd
from .dynamo.associative_scan import define_scans
from .dynamo.scan_operation import scans_as_loops
from .external_cumsum import keep_scans_external
from .inductor import (
    Compiled,
    Hook,
    Stopped,
    bind,
    clone_inputs,
    duplicate,
    first_line,
    inductor_with,
    sums_are_external,
    with_part,
)
from .ir.captured_loop import captured_loops, parts
from .ir.cost import Cost, computing, graph_cost, has_pointwise_kernels
from .ir.evaluate import values_at
from .ir.fx import copied_graph, is_made, loop_operation
from .ir.rewrite import Rewrite
from .ir.source import operator_calls
from .options import Options
from .passes.reroll_loops import STAYS
from .pipeline import run as run_pipeline
from .private import TraceAgain
from .recurrence.serial_chains import unrolled_operations
from .recurrence.vectorize import NotALoop
from .refusals import refused
from .validate.program import Rewritten, choose_program, compared, left_eager
from .validate.region import Verdict, undisturbed_rng, validate_region

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
    """The compile of one graph: find rewrites, judge them, take the fastest program."""

    def __init__(
        self,
        gm: GraphModule,
        inputs: Sequence[Any],
        options: Options,
        entry: GraphReport,
        store: Store,
        *,
        earlier: GraphCompile | None = None,
    ) -> None:
        # The compile whose rewrites lost the race together. What it found out holds; each region is now timed alone.
        self.earlier = earlier
        # The original as Inductor compiles it, if it was.
        self.rivals: dict[str, Compiled] = {} if earlier is None else earlier.rivals
        self.inputs, self.options, self.entry, self.store = inputs, options, entry, store
        self.given = define_scans(scans_as_loops(gm, entry.notes), everywhere=entry.mode == "training")
        self.gm = define_scans(self.given, everywhere=True)
        # What Inductor compiles the rewritten graph with.
        self.inductor = {**options.inductor, **options.choose.inductor}
        self.refused: set[str] = set()
        self.verdicts: dict[str, Verdict] = {}
        self.rows: dict[str, RewriteReport] = {}
        # How many sizes of cumulative sums are handed to ATen, and how many there are.
        self.external_scans, self.scan_sizes = 0, 0
        # The number of terms in the longest sum that was rewritten.
        self.terms = 1
        # How many operations of the original Inductor would generate code for, backward included.
        self.operations = 0
        # Rewrites (pass, line) that are known to lose the race.
        self.lost: set[tuple[str, str]] = set()
        # Whether AOTAutograd's cache is asked; whether the last compile showed its graph; whether Inductor failed.
        self.cached, self.seen, self.failed = True, False, False

    def run(self) -> Compiled:
        """Return the program that runs from now on, and fill the report."""
        start = time.perf_counter()
        entry = self.entry
        defined = self.gm is not self.given
        saved = self._rewrite_before_autograd()
        try:
            compiled = self._built()
            applied = any(row.status == "applied" for row in self.rows.values())
            if defined and not applied:  # Inductor has code of its own for PyTorch's scans
                self.gm = self.given
                compiled = self._built()
        except TooLong as reason:
            return self._left_eager(reason)
        entry.flops_before += saved.flops
        entry.bytes_before += saved.bytes
        entry.compile_s = time.perf_counter() - start - entry.checks_s
        entry.rewrites = list(self.rows.values())
        entry.external_scans = self.external_scans
        if compiled is None:
            entry.chosen = "eager"
            return self.given
        if not entry.applied and not self.external_scans:
            entry.chosen = "inductor"
            entry.reason = "every rewrite that was tried was refused" if self.rows else ""
            if wrong := self._wrong_as_given(compiled):
                entry.chosen, entry.reason = "eager", f"because {wrong}"
                warn(f"{wrong}; the graph runs eagerly")
                return self.given
        else:
            entry.chosen = "refold"
            if entry.applied and (self.options.verify != "off" or self.options.accept == "faster"):
                compiled = self._last_word(compiled)
        races = [verdict.race for verdict in self.verdicts.values() if verdict.race is not None]
        entry.busy = entry.busy or next((race.busy for race in races if race.busy), "")
        entry.provisional |= any(verdict.hurried for verdict in self.verdicts.values())
        count = len(entry.applied)
        log.info("graph %d: %s runs, %d rewrite%s", entry.index, entry.runs, count, "" if count == 1 else "s")
        return compiled

    def _built(self) -> Compiled | None:
        """Compile the graph, unless that takes too long.

        Raises:
            TooLong: It would.
        """
        self._check_time(unrolled_seconds(self.gm, self.entry.mode))
        return self._compile()

    def _left_eager(self, reason: TooLong) -> Compiled:
        """Let the graph run eagerly, with scans for those of its loops that are some."""
        entry = self.entry
        for key, row in self.rows.items():
            if not key.startswith(("captured:", "forward:")) and row.status != "refused":
                row.status, row.reason = "refused", refused("too-long", str(reason))
        entry.rewrites = list(self.rows.values())
        entry.chosen, entry.reason = "eager", f"because {reason}"
        entry.notes.append(f"the graph runs eagerly: {refused('too-long', str(reason))}")
        log.warning("refold: graph %d runs eagerly: %s", entry.index, reason)
        if not entry.applied:
            return self.given
        entry.chosen = "refold"
        for name in ("flops_before", "flops_after", "bytes_before", "bytes_after"):
            setattr(entry, name, sum(getattr(row, name) for row in entry.applied))
        return self._last_word(self.gm, lambda: self.gm)

    def _wrong_as_given(self, compiled: Compiled) -> str:
        """Say how Inductor's program of a graph that nothing rewrites is wrong; only PyTorch's loops are looked at."""
        kinds = [name for node in self.given.graph.nodes if (name := loop_operation(node))]
        if not kinds or self.options.verify == "off":
            return ""
        start = time.perf_counter()
        left = Rewritten(compiled, self._repeatable, self.terms, self.gm, 0.0)
        try:
            reason = compared(left, self.given, {"eager": self.given}, self.inputs, self.options, self.entry)
        except Exception as error:  # of Inductor's program, or of eager's: neither has a common type
            reason = ""
            self.entry.notes.append(f"Inductor's program of `{kinds[0]}` was not checked: {first_line(error)}")
        self.entry.checks_s += time.perf_counter() - start
        return f"Inductor's program of PyTorch's `{kinds[0]}` {reason}" if reason else ""

    def _last_word(self, compiled: Compiled, repeatable: Callable[[], Compiled] | None = None) -> Compiled:
        """Check the whole graph, and race it if that is wanted."""
        start, entry = time.perf_counter(), self.entry
        seconds = layer_seconds(self.operations)
        rewritten = Rewritten(compiled, repeatable or self._repeatable, self.terms, self.gm, seconds)
        try:
            return choose_program(rewritten, self.given, self.inputs, self.options, entry, self.rivals)
        finally:  # what it took to compile the original is told apart
            entry.checks_s += time.perf_counter() - start - (entry.inductor_compile_s or 0.0)

    # What a replay does otherwise ----------------------------------------------------------------

    def _wanted(self, key: str) -> bool:
        """Tell whether a rewrite may be made."""
        return key not in self.refused and key not in self.options.choose.skip

    def _note(self, key: str, rewrite: Rewrite, verdict: Verdict | None) -> RewriteReport:
        """Write down a rewrite and what is known of it."""
        row = self.rows[key] = _row(rewrite, key, verdict)
        if verdict is not None and verdict.reason:
            row.status = "refused"
            self.refused.add(key)
        return row

    # How many operations fewer Inductor sees because of what was rewritten before autograd.
    _operations_saved = 0
    # Whether it is known that the rewrites fit although the graph was not seen.
    _known = False

    @property
    def _stands(self) -> bool:
        """Whether it is known that a rewrite will be applied."""
        return self._unjudged or any(not verdict.reason for verdict in self.verdicts.values())

    @property
    def _unjudged(self) -> bool:
        """Whether rewrites are applied without a verdict."""
        return self.options.verify == "off" and self.options.accept == "always"

    def _repeatable(self) -> Compiled:
        """Compile the graph again, with random numbers drawn as eager draws them."""
        self.inductor["fallback_random"] = True
        compiled = self._compile()
        if compiled is None:
            raise RuntimeError("Inductor cannot compile the graph with eager's random numbers")
        return compiled

    # Loops that were captured --------------------------------------------------------------------

    def _rewrite_before_autograd(self) -> Cost:
        """Replace what is rewritten before autograd; return what that saves."""
        return self._rewrite_captured() + self._rewrite_forward()

    def _rewrite_captured(self) -> Cost:
        """Replace captured loops by scans, where that stands; return what they cost more than their scans."""
        saved = Cost()
        for path in parts(self.gm):
            part: Any = self.gm.get_submodule(".".join(path))
            names = [call.name for call in captured_loops(part)]
            if not names:
                continue
            from .dynamo.to_scan import describe_loop

            part = duplicate(part)
            self.gm = with_part(self.gm, path, part)
            for name in names:
                call = next(node for node in part.graph.nodes if node.name == name)
                try:
                    found = self._as_operator(part, path, call)
                except NotALoop as reason:
                    self.entry.notes.append(f"{STAYS} {reason.told_of(describe_loop(part, call))}")
                    continue
                if found is not None:
                    found.splice()
                    before, after = found.rewrite.before, found.rewrite.after
                    saved += Cost(before.flops - after.flops, before.bytes - after.bytes)
            part.recompile()
        return saved

    def _as_operator(self, part: GraphModule, path: tuple[str, ...], call: Node) -> Any:
        """Return a captured loop of a part of the graph as the scan that stands; None if none does."""
        from .dynamo.to_scan import find_scan

        for dual in (True, False):
            key = ":".join(["captured", *path, call.name, str(dual)])
            if not self._wanted(key):
                continue
            with torch.set_grad_enabled(self.entry.mode == "training"):
                found = find_scan(part, call, dual)
            self.options.choose.tune(found.rewrite.candidate.graph)
            start = time.perf_counter()
            verdict = None if self._unjudged else self._verdict(found.rewrite, path)
            self.entry.checks_s += time.perf_counter() - start
            row = self._note(key, found.rewrite, verdict)
            if row.status != "refused":
                row.status = "applied"
                self.terms = max(self.terms, found.rewrite.terms)
                self.entry.notes += found.notes
                return found
            if not found.dual:
                break  # else what does not write the states rounds too much, or is slower
        return None

    def _rewrite_forward(self) -> Cost:
        """Rewrite the ATen graph of a forward before autograd; return what that saves."""
        saved, training = Cost(), self.entry.mode == "training"
        if (tools := _tools_before_autograd(self.gm, training)) is None:
            return saved
        if not training and (self.options.rules or self.options.choose.passes is not None):
            return saved  # they are for the graph as AOTAutograd gives it
        for path in parts(self.gm):
            key = ":".join(["forward", *path]) + ":"
            while True:
                wanted = functools.partial(self._is_wanted_of, key)
                found = tools.find_rewrites(self.gm, path, wanted, self.entry.notes, self._known, training)
                if found is None:
                    break
                rows = []
                start = time.perf_counter()
                for rewrite in found.rewrites:
                    verdict = None if self._unjudged else self._verdict(rewrite, path)
                    rows.append(self._note(key + rewrite.site, rewrite, verdict))
                self.entry.checks_s += time.perf_counter() - start
                if any(row.status == "refused" for row in rows):
                    continue  # the others may be otherwise without it
                for rewrite, row in zip(found.rewrites, rows, strict=True):
                    row.status = "applied"
                    self.terms = max(self.terms, rewrite.terms)
                    before, after = rewrite.before, rewrite.after
                    saved += Cost(before.flops - after.flops, before.bytes - after.bytes)
                    fewer = computing(rewrite.original.graph.nodes) - computing(rewrite.candidate.graph.nodes)
                    self._operations_saved += (WITH_BACKWARD if training else 1) * fewer
                self.gm = with_part(self.gm, path, found.spliced())
                break
        return saved

    def _is_wanted_of(self, key: str, site: str) -> bool:
        return self._wanted(key + site)

    def _verdict(self, rewrite: Rewrite, path: tuple[str, ...] = ()) -> Verdict:
        """Judge a rewrite of Dynamo's graph, or of a part of it, on the values that it gets from the user's inputs."""
        if rewrite.signature not in self.verdicts:
            with undisturbed_rng():
                actual = self._values(rewrite.inputs, path)
                self.verdicts[rewrite.signature] = self._judged(rewrite, actual)
        return self.verdicts[rewrite.signature]

    def _values(self, names: Sequence[str], path: tuple[str, ...]) -> list[Any]:
        """Return the values of nodes of Dynamo's graph, or of a part of it that is checkpointed."""
        graph, inputs = self.gm.graph, clone_inputs(self.inputs)
        for name in path:
            call = next(iter(next(node for node in graph.nodes if node.target == name).users))
            given: list[Any] = list(call.args[1:])
            inner = values_at(graph, [x.name for x in given if isinstance(x, Node)], inputs)
            inputs = [inner[x.name] if isinstance(x, Node) else x for x in given]
            graph = graph.owning_module.get_submodule(name).graph  # type: ignore[union-attr, assignment]
        found = values_at(graph, names, inputs)
        return [found[name] for name in names]

    # Finding and checking rewrites ------------------------------------------------------------

    def _compile(self) -> Compiled | None:
        """Start Inductor until every rewrite it sees has been judged; None if it cannot compile the graph."""
        while True:
            pending: list[_Pending] = []
            facts = [repr(self.options.choose), *(rule.digest for rule in self.options.rules)]
            facts += [node.name for node in self.gm.graph.nodes if is_made(node)]  # they are treated otherwise
            outcome = digest([*versions(), *facts, *sorted(self.refused), str(self.external_scans)])
            hook = Hook(functools.partial(self._visit, pending), outcome, self.cached)
            log.info("compiling graph %d", self.entry.index)
            try:
                options = {**SHARES, **self.inductor} if self._stands else self.inductor
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
                if self.seen or self._known:
                    return compiled
                self.cached = False  # the cache answered, and what was rewritten is not known
                continue
            start = time.perf_counter()
            for found in pending:
                self._judge(found)
            self.entry.checks_s += time.perf_counter() - start
            self.cached = bool(pending)

    def _visit(self, pending: list[_Pending], index: int, graph: Graph) -> None:
        """Rewrite one ATen graph in place, or stop the compile to judge what is new."""
        if any(str(node.target).startswith("tangents") for node in graph.find_nodes(op="placeholder")):
            self.entry.mode = "training"
        if index == 0:
            self.entry.flops_before = self.entry.flops_after = self.entry.bytes_before = self.entry.bytes_after = 0
            self.operations = self._operations_saved
        self.operations += computing(graph.nodes)
        before = graph_cost(graph.nodes)
        original = copied_graph(graph)
        notes: list[str] = []
        rewrites = self.options.rewrite(graph, lambda site: self._wanted(f"{index}:{site}"), notes)
        add_notes(self.entry, notes)
        # All rewrites are in the graph, also those that are still to be judged: without them it is longer.
        if inductor_seconds(len(graph.nodes)) > self.options.compile_budget:
            self._check_time(inductor_seconds(unrolled_operations(graph)))
        verdicts = [self.verdicts.get(rewrite.signature) for rewrite in rewrites]
        if not self._unjudged and any(verdict is None or verdict.reason for verdict in verdicts):
            pending.append(_Pending(index, original, graph, rewrites))
            raise Stopped
        for rewrite, verdict in zip(rewrites, verdicts, strict=True):
            self._note(f"{index}:{rewrite.site}", rewrite, verdict).status = "applied"
            self.terms = max(self.terms, rewrite.terms)
        after = graph_cost(graph.nodes) if rewrites else before
        self.entry.flops_before += before.flops
        self.entry.flops_after += after.flops
        self.entry.bytes_before += before.bytes
        self.entry.bytes_after += after.bytes
        self.scan_sizes = max(self.scan_sizes, keep_scans_external(graph, self.external_scans))

    def _check_time(self, seconds: float) -> None:
        """Raise if Inductor would take longer for unrolled loops than it may."""
        if seconds > (budget := self.options.compile_budget):
            raise TooLong(
                f"Inductor would take about {seconds:.0f} s to compile an unrolled loop; compile_budget is {budget:g} s"
            )

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
            self.entry.notes.append("the graph's inputs could not be matched: rewrites were checked on random ones")
        for rewrite in fresh:
            actual = [values[name] for name in rewrite.inputs] if values.keys() >= set(rewrite.inputs) else None
            with undisturbed_rng():
                self.verdicts[rewrite.signature] = self._judged(rewrite, actual)
        for rewrite in rewrites:
            self._note(f"{index}:{rewrite.site}", rewrite, self.verdicts[rewrite.signature])

    def _judged(self, rewrite: Rewrite, actual: Sequence[Any] | None) -> Verdict:
        """Judge a rewrite, unless it was judged before in this place."""
        if (rewrite.name, rewrite.source) in self.lost:
            return Verdict("not faster at sizes between the same powers of two")
        before = None if self.earlier is None else self.earlier.verdicts.get(rewrite.signature)
        if before is not None and not before.postponed:
            return before
        facts = [rewrite.signature, str(rewrite.differentiated), str(rewrite.spread), str(rewrite.terms)]
        each = self.earlier is not None
        options = json.dumps(dict(self.options.inductor), sort_keys=True, default=repr)
        key = digest([*facts, self.options.verify, self.options.accept, options, str(each)])
        evidence = None if before is None else before.evidence
        if (found := self.store.get("region", key)) is not None:
            try:
                stored = Verdict.from_dict(found[0])
            except (KeyError, TypeError) as error:
                self.entry.notes.append(
                    f"the stored decision on a region ({found[1]}) cannot be read, so it is checked again: {error}"
                )
            else:
                if not stored.hurried or found[1] != "the disk":
                    return stored
                evidence = stored.evidence  # what a check found does not depend on the load; times do
        verdict = validate_region(rewrite, actual, self.options, each, evidence)
        self.store.put("region", key, dataclasses.asdict(verdict))
        return verdict

    @property
    def lost_together(self) -> bool:
        """Whether rewrites lost the race of the whole graph that may be faster without some of the others."""
        stood = [verdict.postponed for verdict in self.verdicts.values() if not verdict.reason]
        others = len(stood) > 1 or any(key.startswith("captured:") for key in self.rows)
        return self.entry.chosen != "refold" and self.entry.speedup is not None and any(stood) and others

    def _recover(self, error: Exception) -> bool:
        """After Inductor failed: tell whether another attempt is worth it."""
        if self.external_scans < self.scan_sizes:
            self.external_scans += 1
            if (note := sums_are_external(error)) not in self.entry.notes:
                self.entry.notes.append(note)
            return True
        left_eager(error, self.gm, self.options, self.entry)
        return False


def _tools_before_autograd(gm: GraphModule, training: bool) -> Any:
    """Return the module that rewrites graphs before autograd; None if PyTorch lacks what it needs, or it is of no use.

    In inference it is of use on devices where a convolution or a norm becomes an operator.
    """
    given = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    pays = training or any(isinstance(x, torch.Tensor) and has_pointwise_kernels(x.device) for x in given)
    return rewriting_before_autograd() if pays else None


def _row(rewrite: Rewrite, key: str, verdict: Verdict | None) -> RewriteReport:
    row = RewriteReport(
        key=key,
        signature=rewrite.signature,
        name=rewrite.name,
        site=rewrite.site,
        source=rewrite.source,
        why=rewrite.why,
        detail=rewrite.detail,
        becomes=operator_calls(rewrite.candidate.graph),
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


def add_notes(entry: GraphReport, notes: Sequence[str]) -> None:
    """Write notes of the passes into a report; of loops that were captured, it says already why they stay."""
    told = any(note.startswith(STAYS) for note in entry.notes)
    entry.notes += [note for note in notes if note not in entry.notes and not (told and note.startswith(STAYS))]


def describe_captured(entry: GraphReport, gm: GraphModule) -> GraphModule:
    """Write into a report what would be rewritten before autograd; return the graph with that."""
    gm = duplicate(define_scans(scans_as_loops(gm, entry.notes), everywhere=True))
    for path in parts(gm):
        part: Any = gm.get_submodule(".".join(path))
        for call in captured_loops(part):
            from .dynamo.to_scan import describe_loop, find_scan

            loop = describe_loop(part, call)
            try:
                found = find_scan(part, call)
            except NotALoop as reason:  # the loop itself is listed when it is unrolled
                entry.notes.append(f"{STAYS} {reason.told_of(loop)}")
                continue
            entry.loops.append(loop)
            entry.notes += found.notes
            entry.rewrites.append(_row(found.rewrite, "", None))
            found.splice()
        part.recompile()
    training = entry.mode == "training"
    if (tools := _tools_before_autograd(gm, training)) is None:
        return gm
    for path in parts(gm):
        if (more := tools.find_rewrites(gm, path, lambda _: True, entry.notes, training=training)) is not None:
            entry.rewrites += [_row(rewrite, "", None) for rewrite in more.rewrites]
            gm = with_part(gm, path, more.spliced())
    return gm


def survey(entry: GraphReport, graph: Graph) -> None:
    """Write into a report what the pipeline would do with a graph; edits the graph."""
    earlier, before, notes = list(entry.rewrites), graph_cost(graph.nodes), list[str]()
    entry.rewrites += [_row(rewrite, "", None) for rewrite in run_pipeline(graph, notes=notes)]
    add_notes(entry, notes)
    after = graph_cost(graph.nodes)
    # What was rewritten before autograd is in the graph already.
    entry.flops_before = before.flops + sum(row.flops_before - row.flops_after for row in earlier)
    entry.bytes_before = before.bytes + sum(row.bytes_before - row.bytes_after for row in earlier)
    entry.flops_after, entry.bytes_after = after.flops, after.bytes
