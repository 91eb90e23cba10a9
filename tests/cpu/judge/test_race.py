"""When a timing test of two processes can decide: calls, clock and other programs follow a script."""

import itertools
import random
from dataclasses import replace

import pytest
import torch

from refold.judge import Terms, Verdict, race, source
from refold.judge.case import Case
from refold.judge.docket import Docket
from refold.judge.errors import Refused, Unjudgeable
from refold.judge.messages import Description
from refold.judge.process import Result
from refold.judge.sides import Sides
from refold.verify.contention import Usage

NOTHING = source("Model = ModelNew = None", name="original.py", role="original")


def case(**terms):
    """Make a case of programs that nothing is run of."""
    docket = Docket(Verdict(NOTHING, NOTHING, Terms(level="quick", **terms)), 1, frozenset())
    docket.draw_secret()
    sides = Sides(NOTHING, NOTHING, None, docket, None)
    return Case(docket, sides)


class Machine:
    """Two processes on two cores, on which other programs may run.

    Args:
        ratio: How many times as long the original takes.
        waited: The share of its time that a call waits for a core; drawn anew for each call, twice that at most.
        others: How many cores other programs use; None if the system does not tell.
    """

    def __init__(self, monkeypatch, *, ratio=1.0, waited=0.4, others=0.0, seed=0):
        self.ratio, self.waited, self.others = ratio, waited, others
        self.draw = random.Random(seed)
        self.wall = self.used = 0.0
        self.calls = 0
        monkeypatch.setattr(race, "usage", self.usage)
        monkeypatch.setattr(race.time, "sleep", lambda seconds: None)
        monkeypatch.setattr(race.os, "sched_getaffinity", lambda pid: {0, 1})

    def usage(self):
        everybody = None if self.others is None else self.used + self.wall * self.others
        return Usage(self.wall, 0.0, everybody)

    def processor_time(self):
        return self.used / 2, 0.0  # of each of the two

    def pin(self, processors):
        pass

    def call(self, seconds, outside=5e-4):
        """Return a call of two threads that works so long, and waits besides."""
        share = min(2 * self.waited * self.draw.random(), 0.9)
        took = seconds * self.draw.uniform(1.0, 1.05) / (1 - share)
        self.wall += 5 * took
        self.used += 2 * seconds
        return Result(
            None,
            [],
            [],
            took,
            processor=2 * seconds,
            outside=outside * self.draw.uniform(0.9, 1.1),
            waited=share * took,
        )

    def race(self, threads=2, seed=1, outside=(5e-4,), **terms):
        trial = race.Race(case(threads=threads, **terms))

        def pair(base, candidate, purpose, swapped):
            o, y = self.call(1e-3 * self.ratio), self.call(1e-3, outside[self.calls % len(outside)])
            self.calls += 1
            trial._given[0] += y.seconds
            trial._given[1] += max(each.waited / each.seconds for each in (o, y)) * y.seconds
            return o, y

        trial._pair = pair
        trial._begin = trial._look = lambda base, candidate: None
        return trial.race(self, self, "race")


def test_a_machine_that_is_slow_to_wake_threads_can_judge(monkeypatch):
    race = Machine(monkeypatch, ratio=1.5, others=0.03).race()
    assert race["faster"]
    assert race["waited"] > 0.36
    assert race["others"] == pytest.approx(0.03)


@pytest.mark.parametrize("others", [0.3, 2.0, None])
def test_waiting_for_other_programs_decides_nothing(monkeypatch, others):
    with pytest.raises(Unjudgeable, match=r"calls waited \d+% of their time") as error:
        Machine(monkeypatch, ratio=1.5, others=others).race()
    assert ("other programs kept" in str(error.value)) == (others is not None)


@pytest.mark.parametrize("ratio", [20.0, 0.05])
def test_a_clear_difference_is_seen_on_a_busy_machine(monkeypatch, ratio):
    race = Machine(monkeypatch, ratio=ratio, others=2.0).race()
    assert race["waited"] > 0.36
    assert race["faster"] == (ratio > 1)


def test_other_programs_that_nobody_waits_for_are_in_nobody_s_way(monkeypatch):
    assert Machine(monkeypatch, ratio=1.5, waited=0.05, others=1.0).race()["faster"]


@pytest.mark.parametrize("waited", [0.1, 0.4, 0.6])
def test_equal_programs_are_not_accepted_however_long_they_wait(monkeypatch, waited):
    races = [Machine(monkeypatch, waited=waited, seed=seed).race(seed=seed) for seed in range(20)]
    assert not any(race["faster"] for race in races)


def test_a_slow_machine_ends_no_race_that_nothing_could_have_decided_yet(monkeypatch):
    """Of four candidates, nine pairs decide nothing, however they end."""
    seconds = itertools.count(0.0, 5.0)
    monkeypatch.setattr(race.time, "perf_counter", lambda: next(seconds))
    assert Machine(monkeypatch, ratio=1.5, waited=0.0).race(tried=4)["faster"]


def test_equal_programs_seem_at_no_time_clearly_different(monkeypatch):
    for seed in range(20):
        with pytest.raises(Unjudgeable):
            Machine(monkeypatch, waited=0.6, others=2.0, seed=seed).race(seed=seed)


def test_processes_that_are_hidden_count_as_other_programs(monkeypatch):
    """What a candidate starts and does not own up to makes the machine busy, not quiet."""
    machine = Machine(monkeypatch, ratio=1.5)
    usage = machine.usage
    monkeypatch.setattr(race, "usage", lambda: replace(usage(), everybody=usage().everybody + 0.5 * machine.wall))
    with pytest.raises(Unjudgeable):
        machine.race()


@pytest.mark.parametrize("outside", [[2e-3], [5e-4] * 9 + [1.6e-2]])
def test_work_between_calls_is_counted(monkeypatch, outside):
    """Also where it is done for many calls at once; else each call would have a millisecond for nothing."""
    machine = Machine(monkeypatch, ratio=1.5, waited=0.0)
    assert machine.race()["faster"]
    assert not machine.race(outside=outside)["faster"]


@pytest.mark.parametrize(
    ("tree", "shape", "reason"),
    [
        ({"sequence": "list", "items": [{"tensor": 0}]}, [4, 4], "it returns list(tensor), the original tensor"),
        ({"tensor": 0}, [4, 1], "result 0 has shape [4, 1], the original's [4, 4]"),
    ],
)
def test_a_timed_result_has_the_structure_of_the_original_s_also_when_that_is_compiled(tree, shape, reason):
    """Other strides are allowed there, because compiled programs have others."""
    of = case()
    of.sides.tree, of.sides.actual = {"tensor": 0}, lambda *purpose: [torch.ones(4, 4)]
    trial = race.Race(of)
    trial._processors, trial._width = [0], 1

    class Process:
        def __init__(self, tree, shape):
            m = Description("Tensor", "float32", "cpu", shape, [4, 1], 64, 64, 64, 64, [], [], False)
            self.result = Result(tree, [m], [torch.ones(shape)], 1.0)

        def pin(self, processors):
            pass

        def call(self, *args, **options):
            return self.result

    trial._compiled = Process({"tensor": 0}, [4, 4])
    with pytest.raises(Refused):
        trial._pair(trial._compiled, Process(tree, shape), ("race", 1, 0), False)
    assert (of.docket.verdict.check, of.docket.verdict.reason) == ("M2", f"in a timed call, {reason}")


def test_what_one_part_of_a_trial_draws_does_not_depend_on_others():
    one, other = case().docket, case().docket
    other.check = "another"
    other.anew("call")
    one.check = other.check = "this"
    drawn = [docket.anew("call") for docket in (one, other, one, other)]
    assert drawn[:2] != drawn[2:]
    assert len(set(drawn)) == 2
