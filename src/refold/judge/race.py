"""Whether a candidate is faster: pairs of calls, each on new content and each with its result compared."""

from __future__ import annotations

import contextlib
import math
import os
import random
import statistics
import time
from dataclasses import replace
from typing import Any

from ..verify.contention import OTHERS, Usage, others, usage
from ..verify.timing import ALPHA, BEST_OF, DELTA, SHORT_MS, median_bounds
from . import inputs
from .case import Case
from .errors import Misbehaved, Unjudgeable
from .messages import Description
from .process import Process, Result
from .results import unlike

BETWEEN_S = 3e-5  # of processor time between two calls, about what equal programs differ by on average
LOOKED_AT = 16  # one timed call in so many is followed by a look at what it left
# What is faster on inputs of the usual kind and weights that stay may be only that. So these are tried among the first
# timed calls, too, and weights change as often; later, in one call of so many.
KINDS = ("uniform", "negated", "x0.01", "x3", "x1000", "sparse")
SELDOM = 8
CLEAR = 2.0  # times as fast, by the bound: what waits of equal programs do not make of each other
WAITED = 0.2  # of the time of calls; more is waiting for other programs, or for a machine that is slow to wake threads
BUSY = 10  # times the time of a timing test that may pass on a busy machine
PATIENCE = 3  # times the time of a timing test that may pass until it can be decided at all
COMPILE_S = 40.0  # what torch.compile may take for the original


def faster(case: Case) -> None:
    """T7: faster beyond noise, each timed call on new content and each timed result verified."""
    if case.docket.terms.accept == "faster":
        with contextlib.ExitStack() as stack:
            Race(case).run(stack)


class Race:
    """Times the candidate against the original, in pairs of calls."""

    def __init__(self, case: Case):
        self.case, self.docket, self.sides = case, case.docket, case.sides
        self._compiled: Process | None = None
        self._places: dict[Process, dict[str, Description]] = {}  # of the weights of the two that are timed
        self._now = case.sides.state  # these weights
        self._odd: dict[int, str] = {}  # which of the first timed calls have inputs of another kind
        self._fresh: set[int] = set()  # and before which weights change
        self._processors = sorted(os.sched_getaffinity(0))
        self._width = min(self.docket.terms.threads, len(self._processors))
        self._given = [0.0, 0.0]  # seconds of timed calls, and how many of them waited
        self._before: tuple[Result, Result] | None = None
        self._modes, self._looked, self._calls = "", False, 0

    def _rival(self, stack: contextlib.ExitStack) -> tuple[Process, str]:
        """Return the faster of the original and the original compiled, each in a process without the candidate."""
        sides, terms = self.sides, self.docket.terms
        if not self.docket.level.rival or terms.rival == "eager" or sides.random or sides.stateful:
            return sides.witness, "eager"
        call = sides.call(sides.actual("rival"))
        try:
            nursery = sides.nursery.other(compiler="triton" not in sides.original.text)
            process = stack.enter_context(sides.ready(sides.original, compiled=True, nursery=nursery))
            process.timeout = COMPILE_S
            process.call(call)
            process.timeout, self._compiled = terms.timeout, process
            times = [min(each.call(call).seconds for _ in range(3)) for each in (sides.witness, process)]
        except Misbehaved as error:
            self.docket.note(f"torch.compile of the original was not timed: {error.reason[:120]}")
            return sides.witness, "eager"
        return (process, "torch.compile") if times[1] < times[0] else (sides.witness, "eager")

    def run(self, stack: contextlib.ExitStack) -> None:
        """Find the faster of the two originals, and time the candidate against it."""
        sides, (base, against) = self.sides, self._rival(stack)
        race = {**self.race(base, sides.suspect, "race"), "against": against}
        self.docket.verdict.timing = race
        for turn in range(self.docket.level.confirmations):
            if not race["faster"]:
                break
            with contextlib.ExitStack() as stack:
                fresh = [stack.enter_context(sides.ready(each)) for each in (sides.original, sides.candidate)]
                first = base if against != "eager" else fresh[0]
                race = {**self.race(first, fresh[1], f"confirmation {turn + 1}"), "against": against}
                self.docket.verdict.timing = race
        speed = f"{race['speedup']:.3f}x of {against} (at least {race['at_least']:.3f}x)"
        words = f"{speed} after {race['pairs']} pairs of calls"
        failure = "" if race["faster"] else f"not shown to be more than {DELTA:.0%} faster: {words}"
        self.docket.step("T7", failure, **race)

    def race(self, base: Process, candidate: Process, name: str) -> dict[str, Any]:
        """Call both in turns until it is known which is faster, or until the time for that is over."""
        looks = self.docket.level.looks
        order = random.Random(self.docket.derived(name, "order"))
        # A busy machine makes calls wait, not work; the limit of time is one of work.
        spent, patience = 0.0, time.perf_counter() + BUSY * self.docket.level.seconds
        share = ALPHA / self.docket.terms.tried / len(looks)
        pairs: list[list[tuple[Result, Result]]] = []
        self._given, self._before = [0.0, 0.0], None
        logs: list[float] = []
        lower = upper = 0.0
        turns = range(1, looks[0] + 1)
        self._odd = dict(zip(order.sample(turns, min(len(KINDS), len(turns))), KINDS, strict=False))
        self._fresh = set(order.sample(turns, len(turns) // 3))
        self._begin(base, candidate)
        began = self._usage(base, candidate)
        done = -1  # the first pair warms both up, as all calls before it did
        for look in looks:
            # So many pairs are needed before all of them won could decide; what is slow gets the time for that.
            most = self.docket.level.seconds * (1 + (0.5**done > share) * PATIENCE)
            first = look == looks[0]
            while done < look and (first or (spent < most and (0.5**done > share or time.perf_counter() < patience))):
                time.sleep(order.random() * 2e-3)  # not in step with anything
                samples = [self._pair(base, candidate, (name, done, 0), order.random() < 0.5)]
                if max(each.seconds for each in samples[0]) * 1e3 < SHORT_MS:
                    more = range(1, BEST_OF)
                    samples += [self._pair(base, candidate, (name, done, i), order.random() < 0.5) for i in more]
                done += 1
                spent += sum(self._seconds(each) for sample in samples for each in sample)
                if done > 0:
                    pairs.append(samples)
            times = self._times(pairs)
            logs = sorted(math.log(a / b) for a, b in zip(*times, strict=True))
            lower, upper = median_bounds(logs, share)
            if lower > math.log1p(DELTA) or upper < math.log1p(DELTA) or len(logs) < look:
                break
        self._look(base, candidate)
        for process, places in self._places.items():
            self.sides.write(process, places, self.sides.state)
        for process in (base, candidate):
            process.pin(set(self._processors))
        given, waited = self._given
        elsewhere = others(self._usage(base, candidate) - began)
        clear = lower > math.log(CLEAR) or upper < -math.log(CLEAR)
        if self.docket.terms.threads > 1 and waited > WAITED * given and not elsewhere < OTHERS and not clear:
            who = "" if math.isnan(elsewhere) else f" while other programs kept {elsewhere:.1f} of them busy"
            raise Unjudgeable(
                f"the machine is busy: calls waited {waited / given:.0%} of their time for its {len(self._processors)} "
                f"processors{who}, and whether a program with several threads is faster cannot be told; try again, or "
                "with one thread"
            )
        return {
            "name": name,
            "base_ms": statistics.median(times[0]) * 1e3,
            "candidate_ms": statistics.median(times[1]) * 1e3,
            "speedup": math.exp(statistics.median(logs)),
            "at_least": math.exp(lower),
            "at_most": math.exp(upper),
            "pairs": len(logs),
            "faster": lower > math.log1p(DELTA),
            "waited": waited / given if given else 0.0,
            "others": elsewhere,
        }

    def _begin(self, base: Process, candidate: Process) -> None:
        """Give both the same state, which the timed calls may change."""
        sides = self.sides
        both = (base, candidate) if sides.shares_state else ()
        for each in both:
            if each is not self._compiled:
                sides.give(each, sides.state, sides.dtype)
        self._places = {each: sides.places(each) for each in both}
        self._now = sides.state
        self._modes, self._looked, self._calls = candidate.inspect().modes, False, 0

    def _look(self, base: Process, candidate: Process) -> None:
        """See what the timed calls so far have left: they, too, change and leave what the original does."""
        if base is not self._compiled:
            self.case.surroundings(base, candidate, self._modes, self._calls)

    def _usage(self, *processes: Process) -> Usage:
        """Read what was used until now, with what these processes used as this one's own."""
        found = usage()
        return replace(found, own=found.own + sum(sum(process.processor_time()) for process in processes))

    def _times(self, pairs: list[list[tuple[Result, Result]]]) -> list[list[float]]:
        """Return the seconds of both sides, of each sample the least.

        Work between calls that the original does not do either is the candidate's own, and so is spread over its calls.
        A process that the candidate started, and that has ended, is counted nowhere; it may have waited for that one.
        So waiting counts in calls during which any program of this machine started one.
        """
        extra = [y.outside - o.outside for samples in pairs for o, y in samples]
        between = max(0.0, statistics.fmean(extra) - BETWEEN_S) if extra else 0.0

        def own(y: Result) -> float:
            return self._seconds(replace(y, waited=0.0) if y.started else y) + between

        return [[min(self._seconds(o) for o, _ in samples) for samples in pairs],
                [min(own(y) for _, y in samples) for samples in pairs]]  # fmt: skip

    def _pair(
        self, base: Process, candidate: Process, purpose: tuple[str, int, int], swapped: bool
    ) -> tuple[Result, Result]:
        """Call both on content that neither has seen."""
        _, turn, sample = purpose
        first, seldom = turn <= self.docket.level.looks[0], self.docket.derived(*purpose, "seldom") % SELDOM == 0
        kind = self._odd.get(turn, "timed") if first else KINDS[turn % len(KINDS)] if seldom else "timed"
        kind = "timed" if sample else kind
        values = self.sides.actual(*purpose)
        if kind != "timed" or self.docket.derived(*purpose, "kind") % 4 == 0:  # rounding shows best on zero-mean values
            values = inputs.draw(kind, values, self.docket.derived(*purpose, "values"))
        if not sample and (turn in self._fresh if first else seldom):
            self._reweigh(purpose)
        call = self.sides.call(values, salt=purpose)

        # On the same processors, so that for both the same other programs are in the way.
        here = set(random.Random(self.docket.derived(*purpose, "here")).sample(self._processors, self._width))
        base.pin(here)
        candidate.pin(here)

        found: dict[Process, Result] = {}
        for process in (candidate, base) if swapped else (base, candidate):
            with self.sides.of_the_original() if process is base else contextlib.nullcontext():
                found[process] = process.call(call)
        o, y = found[base], found[candidate]
        if base is not self._compiled:
            self.case.metadata(o, y)
        elif other := unlike(o, y):
            self.docket.step("M2", f"in a timed call, {other}")
        self.case.numbers.timed(kind, call, o, y, self._now)
        # A candidate may notice that it is timed, so what it leaves is looked at here, too.
        self.case.traces(o, y, self.case.aliases)
        if self._before is not None:
            if self.docket.terms.device != "cpu":  # where looking again is work for the process, for both alike
                base.again(self._before[0])
            self.case.unchanged(candidate, self._before[1])
        self._before = o, y
        self._calls += 1
        if self._looked:  # which was work for the process, between calls
            o, y = replace(o, outside=0.0), replace(y, outside=0.0)
        self._looked = self.docket.derived(*purpose, "look") % LOOKED_AT == 0
        if self._looked:
            self._look(base, candidate)
        self._given[0] += y.seconds
        self._given[1] += max(each.waited / each.seconds for each in (o, y)) * y.seconds
        return replace(o, tensors=[], inputs_after=[]), replace(y, tensors=[], inputs_after=[])

    def _reweigh(self, purpose: tuple[object, ...]) -> None:
        """Change weights in the memory of both, which are told nothing."""
        sides = self.sides
        if not all(self._places.values()) or not self._places:
            return
        names = set.intersection(*map(set, self._places.values())) & sides.constant
        kind = ("grown", "moved")[self.docket.derived(*purpose, "weights") % 2]
        other = sides.other_weights(kind, *purpose, spread=0.1)
        self._now = {name: other[name] if name in names else value for name, value in sides.state.items()}
        for process, places in self._places.items():
            sides.write(process, {name: places[name] for name in names}, other)

    def _seconds(self, result: Result) -> float:
        """Return the time of a call, without that in which other programs had its processor.

        Of one thread it is known how long it waited. What its process used is counted in any case, so that waiting for
        one's own helpers is no gain. Of several threads it is not known.
        """
        threads = self.docket.terms.threads
        return result.seconds if threads > 1 else max(result.seconds - result.waited, result.processor)
