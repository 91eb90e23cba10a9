"""Whether a candidate is faster: pairs of calls, each on new content and each with its result compared."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import random
import statistics
import time
from dataclasses import replace
from typing import Any

import torch

from ..contention import OTHERS, Usage, others, usage
from ..timing import ALPHA, BEST_OF, DELTA, SHORT_MS, median_bounds
from . import inputs
from .comparison import Comparison
from .process import Call, Misbehaved, Result, Unjudgeable, Worker
from .results import judged, unlike

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
POSSIBLE = 0.5  # of the time that writing the results takes, on a machine that may be busier at one time than another


class Race(Comparison):
    """The part of a trial that is about time."""

    def _faster(self) -> None:
        """T7: faster beyond noise, each timed call on new content and each timed result verified."""
        with contextlib.ExitStack() as stack:
            base, name = self._rival(stack)
            self._decided(base, name)

    def _rival(self, stack: contextlib.ExitStack) -> tuple[Worker, str]:
        """Return the faster of the original and the original compiled, each in a process without the candidate."""
        if not self.level.rival or self.terms.rival == "eager" or self._random or self._stateful:
            return self.witness, "eager"
        call = self._call(self._actual("rival"))
        try:
            nursery = self.nursery.other(compiler="triton" not in self.original.text)
            worker = stack.enter_context(nursery.program(self.original.text, "original.py", room=self.suspect.room))
            worker.load(self.original.attribute, self.terms.timeout)
            self._build(worker, self.original, self.terms.dtype, compiled=True)
            worker.call(call, COMPILE_S)
            self._compiled = worker
            times = [
                min(each.call(call, self.terms.timeout).seconds for _ in range(3)) for each in (self.witness, worker)
            ]
        except Misbehaved as error:
            self.verdict.note(f"torch.compile of the original was not timed: {error.reason[:120]}")
            return self.witness, "eager"
        return (worker, "torch.compile") if times[1] < times[0] else (self.witness, "eager")

    def _decided(self, base: Worker, against: str) -> None:
        race = {**self._race(base, self.suspect, "race"), "against": against}
        self.verdict.timing = race
        if self.level.confirmations and race["faster"]:
            self._alike_twins(base, against)
        for turn in range(self.level.confirmations):
            if not race["faster"]:
                break
            with contextlib.ExitStack() as stack:
                fresh = []
                for program, name in ((self.original, "original.py"), (self.candidate, "candidate.py")):
                    worker = stack.enter_context(self.nursery.program(program.text, name, room=self.suspect.room))
                    worker.load(program.attribute, self.terms.timeout)
                    self._build(worker, program, self.terms.dtype)
                    fresh.append(worker)
                first = base if against != "eager" else fresh[0]
                race = {**self._race(first, fresh[1], f"confirmation {turn + 1}"), "against": against}
                self.verdict.timing = race
        self._possible(race)
        speed = f"{race['speedup']:.3f}x of {against} (at least {race['at_least']:.3f}x)"
        words = f"{speed} after {race['pairs']} pairs of calls"
        failure = "" if race["faster"] else f"not shown to be more than {DELTA:.0%} faster: {words}"
        self._step("T7", failure, **race)

    def _alike_twins(self, base: Worker, against: str) -> None:
        """T6: two processes with the same program are equally fast, or the clock cannot be trusted here."""
        with contextlib.ExitStack() as stack, self._of_the_original():
            twin = stack.enter_context(
                self.nursery.program(self.original.text, "original.py", room=self.suspect.room, beside=self._compiled)
            )
            twin.load(self.original.attribute, self.terms.timeout)
            self._build(twin, self.original, self.terms.dtype, compiled=against != "eager")
            race = self._race(base, twin, "twins")
        apart = race["at_least"] > 1 + DELTA or race["at_most"] < 1 / (1 + DELTA)
        if apart and "T6" not in self.off:
            raise Unjudgeable(
                f"two processes with the original take different times here: {race['speedup']:.3f}x, "
                f"{race['at_least']:.3f}x to {race['at_most']:.3f}x; try again on a quiet machine"
            )
        self._step("T6", "", **race)

    def _possible(self, race: dict[str, Any]) -> None:
        """T5: no result is written in less time than its bytes take to be written."""
        own = [t for t, alias in zip(self._kept.tensors, self._kept.aliases, strict=True) if alias is None]
        size = sum(t.numel() * t.element_size() for t in own)
        into = torch.empty(size, dtype=torch.uint8)
        least = math.inf
        for value in range(5):
            start = time.thread_time()  # waiting for a processor is no part of it
            ctypes.memset(into.data_ptr(), value, size)
            least = min(least, time.thread_time() - start)
        floor = POSSIBLE * least * 1e3 / self.terms.threads
        impossible = race["candidate_ms"] < floor
        failure = f"it took {race['candidate_ms']:.3g} ms, less than to write its results takes ({floor:.3g} ms)"
        self._step("T5", failure if impossible else "", floor_ms=floor)

    def _race(self, base: Worker, candidate: Worker, name: str) -> dict[str, Any]:
        order = random.Random(self._derived(name, "order"))
        # A busy machine makes calls wait, not work; the limit of time is one of work.
        spent, patience = 0.0, time.perf_counter() + BUSY * self.level.seconds
        share = ALPHA / self.terms.tried / len(self.level.looks)
        pairs: list[list[tuple[Result, Result]]] = []
        self._processor = [0.0, 0.0, 0.0]
        self._before: tuple[Result, Result] | None = None
        self._processors = sorted(os.sched_getaffinity(0))
        self._width = min(self.terms.threads, len(self._processors))
        logs: list[float] = []
        lower = upper = 0.0
        turns = range(1, self.level.looks[0] + 1)
        self._odd = dict(zip(order.sample(turns, min(len(KINDS), len(turns))), KINDS, strict=False))
        self._fresh = set(order.sample(turns, len(turns) // 3))
        self._begin(base, candidate)
        began = self._usage(base, candidate)
        self._alone = candidate.births()
        done = -1  # the first pair warms both up, as all calls before it did
        for look in self.level.looks:
            # So many pairs are needed before all of them won could decide; what is slow gets the time for that.
            most = self.level.seconds * (1 + (0.5**done > share) * PATIENCE)
            while done < look and (look == self.level.looks[0] or (spent < most and time.perf_counter() < patience)):
                time.sleep(order.random() * 2e-3)  # not in step with anything
                samples = [self._pair(base, candidate, (name, done, 0), order.random() < 0.5)]
                if max(each.seconds for each in samples[0]) * 1e3 < SHORT_MS:
                    more = range(1, BEST_OF)
                    samples += [self._pair(base, candidate, (name, done, i), order.random() < 0.5) for i in more]
                done += 1
                spent += sum(self._seconds(each) for sample in samples for each in sample)
                if done > 0:
                    pairs.append(samples)
            times = self._times(candidate, pairs)
            logs = sorted(math.log(a / b) for a, b in zip(*times, strict=True))
            lower, upper = median_bounds(logs, share)
            if lower > math.log1p(DELTA) or upper < math.log1p(DELTA) or len(logs) < look:
                break
        self._look(base, candidate)
        for worker, places in self._places_of.items():
            self._written(worker, places, self._state)
        for worker in (base, candidate):
            worker.pin(set(self._processors))
        used, given, waited = self._processor
        elsewhere = others(self._usage(base, candidate) - began)
        clear = lower > math.log(CLEAR) or upper < -math.log(CLEAR)
        if self.terms.threads > 1 and waited > WAITED * given and not elsewhere < OTHERS and not clear:
            who = "" if math.isnan(elsewhere) else f" while other programs kept {elsewhere:.1f} of them busy"
            raise Unjudgeable(
                f"the machine is busy: calls waited {waited / given:.0%} of their time for its {len(self._processors)} "
                f"processors{who}, and whether a program with several threads is faster cannot be told; try again, or "
                "with one thread"
            )
        processors = used / given if given else 0.0
        most = 1.15 * self.terms.threads + 0.02 / given
        failure = f"it used {processors:.1f} processors during its calls, and was given {self.terms.threads}"
        self._step("T1", failure if processors > most else "", processors=round(processors, 2))
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

    def _begin(self, base: Worker, candidate: Worker) -> None:
        """Give both the same state, which the timed calls may change."""
        own = getattr(torch, self.terms.dtype)
        if self._shares_state:
            self._give(self._state, [(each, own) for each in (base, candidate) if each is not self._compiled])
        both = (base, candidate) if self._shares_state else ()
        self._places_of = {each: self._places(each) for each in both}
        self._now = self._state
        self._modes, self._looked, self._calls = candidate.inspect()["modes"], False, 0

    def _look(self, base: Worker, candidate: Worker) -> None:
        """See what the timed calls so far have left: they, too, change and leave what the original does."""
        if base is not self._compiled:
            self._surroundings(base, candidate, self._modes, self._calls)

    def _usage(self, *workers: Worker) -> Usage:
        """Return what was used until now, with what these processes used as this one's own."""
        found = usage()
        return replace(found, own=found.own + sum(sum(worker.processor_time()) for worker in workers))

    def _times(self, candidate: Worker, pairs: list[list[tuple[Result, Result]]]) -> list[list[float]]:
        """Return the seconds of both sides, of each sample the least.

        Work between calls that the original does not do either is the candidate's own, and so is spread over its calls.
        A process that the candidate started, and that has ended, is counted nowhere; it may have waited for that one.
        """
        before, now = self._alone, candidate.births()
        known = before is not None and now is not None
        alone = before is not None and now == before + 1
        if alone:
            self._alone = now

        extra = [y.outside - o.outside for samples in pairs for o, y in samples]
        between = max(0.0, statistics.fmean(extra) - BETWEEN_S) if extra else 0.0

        def own(y: Result) -> float:
            trusted = alone if known else not y.started
            return self._seconds(y if trusted else replace(y, waited=0.0)) + between

        return [
            [min(self._seconds(o) for o, _ in samples) for samples in pairs],
            [min(own(y) for _, y in samples) for samples in pairs],
        ]

    def _pair(
        self, base: Worker, candidate: Worker, purpose: tuple[str, int, int], swapped: bool
    ) -> tuple[Result, Result]:
        """Call both on content that neither has seen."""
        _, turn, sample = purpose
        first, seldom = turn <= self.level.looks[0], self._derived(*purpose, "seldom") % SELDOM == 0
        kind = self._odd.get(turn, "timed") if first else KINDS[turn % len(KINDS)] if seldom else "timed"
        kind = "timed" if sample else kind
        values = self._actual(*purpose)
        if kind != "timed" or self._derived(*purpose, "kind") % 4 == 0:  # rounding shows best on zero-mean values
            values = inputs.draw(kind, values, self._derived(*purpose, "values"))
        if not sample and (turn in self._fresh if first else seldom):
            self._reweigh(purpose)
        call = self._call(values, salt=purpose)

        # On the same processors, so that for both the same other programs are in the way.
        here = set(random.Random(self._derived(*purpose, "here")).sample(self._processors, self._width))
        base.pin(here)
        candidate.pin(here)

        def ask_base() -> Result:
            with self._of_the_original():
                return base.call(call, self.terms.timeout)

        def ask_candidate() -> Result:
            return candidate.call(call, self.terms.timeout, most=self._most)

        if swapped:
            y = ask_candidate()
            o = ask_base()
        else:
            o = ask_base()
            y = ask_candidate()
        if base is not self._compiled:
            self._metadata(o, y)
        elif other := unlike(o, y):
            self._step("M2", f"in a timed call, {other}")
        self._verify(kind, call, o, y)
        # A candidate may notice that it is timed, so what it leaves is looked at here, too.
        self._traces(o, y)
        if self._before is not None:
            if self.terms.device != "cpu":  # where looking again is work for the process, for both alike
                base.again(self._before[0])
            self._unchanged(candidate, self._before[1])
        self._before = o, y
        self._calls += 1
        if self._looked:  # which was work for the process, between calls
            o, y = replace(o, outside=0.0), replace(y, outside=0.0)
        self._looked = self._derived(*purpose, "look") % LOOKED_AT == 0
        if self._looked:
            self._look(base, candidate)
        self._processor[0] += y.processor
        self._processor[1] += y.seconds
        self._processor[2] += max(each.waited / each.seconds for each in (o, y)) * y.seconds
        if self.suspect.lingering():
            self._step("S6", "another process of it ran during its timed calls")
        return replace(o, tensors=[], inputs_after=[]), replace(y, tensors=[], inputs_after=[])

    def _reweigh(self, purpose: tuple[object, ...]) -> None:
        """Change weights in the memory of both, which are told nothing."""
        if not all(self._places_of.values()) or not self._places_of:
            return
        names = set.intersection(*map(set, self._places_of.values())) & self._constant
        other = self._other_weights(*purpose, "weights", spread=0.1)
        self._now = {name: other[name] if name in names else value for name, value in self._state.items()}
        for worker, places in self._places_of.items():
            self._written(worker, {name: places[name] for name in names}, other)

    def _verify(self, kind: str, call: Call, o: Result, y: Result) -> None:
        """C3: a timed result is right. First by the original's own result, whose error counts twice."""
        known = self._known * 1.125
        usual = "" if self._lucky or kind != "timed" else kind
        near = [
            judged(usual, a.double() if a.is_floating_point() else a, a, b, known, self._longest)
            for a, b in zip(o.tensors, y.tensors, strict=True)
        ]
        far = next((one for one in near if one.reason), None)
        if far is not None and not (self._random or self._stateful):
            self._closely(kind, call, o, y)
        elif far is not None:
            self._step("C3", f"a timed call gave a wrong result: {far.reason}", error=far.error, bound=far.bound)
        self._past.append(y)

    def _closely(self, kind: str, call: Call, o: Result, y: Result) -> None:
        """Compare a timed result as any other, with float64 and moved inputs."""
        sides = [(self.reference, torch.float64), (self.witness, getattr(torch, self.terms.dtype))]
        if self._shares_state:
            self._give(self._now, sides)
        with self._of_the_original():
            r = self.reference.call(self._wide(call), self.terms.timeout)
        self._numbers(kind, "C3", call, r, o, y)
        if self._shares_state:
            self._give(self._state, sides[:1])
